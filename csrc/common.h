// What the library's files share: small helpers, and how the kernels' functions are declared.
#pragma once
#include <cstdlib>
#include <cstring>

#include "wbmm.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define SPOTLIGHTS_X86 1
#endif

#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE static INLINE_MEMBER

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t shuffle_order __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, shuffle_order{__VA_ARGS__})
#endif

namespace {

typedef uint16_t bfloat16;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
inline float* allocate(int64_t floats) { return static_cast<float*>(aligned_alloc(64, parts(floats * 4, 64) * 64)); }

inline bool known(int32_t dtype) { return dtype == SPOTLIGHTS_FLOAT32 || dtype == SPOTLIGHTS_BFLOAT16; }
inline bool valid_map(int32_t dtype, int64_t batch, int64_t rows, int64_t channels) {
    return known(dtype) && batch >= 0 && rows >= 0 && channels >= 0;
}
inline int32_t finish(int32_t code) { return code == 0 ? SPOTLIGHTS_OK : SPOTLIGHTS_THREADS; }

}  // namespace
