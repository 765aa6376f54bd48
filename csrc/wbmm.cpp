#include "wbmm.h"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

struct Layout {
    int64_t x_row, x_column, y_row, y_column, wh, ww;
};

// Widest run of outputs kept in registers; a wider window is swept in equal parts.
constexpr int64_t kMostColumns = 14;

struct Forward {
    spotlights_wbmm_shape shape;
    const float* x;
    float* y;
    const float* packed;
    const float* bias;
    int64_t x_stride[3], y_stride[3];
    int64_t strips;  // rows of windows in one item of work
    Layout layout;
    int32_t no_memory;
};

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
inline float* allocate(int64_t floats) { return static_cast<float*>(aligned_alloc(64, parts(floats * 4, 64) * 64)); }

// The table's gradient as it is summed: rows of 2*wh-1 offsets, columns padded to a multiple of the tile.
struct Sums {
    int64_t wh, columns;
};

struct Gradient {
    spotlights_wbmm_shape shape;
    const float *x, *g;
    int64_t x_stride[3], g_stride[3];
    int64_t chunks;
    float* partial;
    float* gradient;
    Sums sums;
    int64_t lanes;
    int32_t no_memory;
};

constexpr int64_t kGroupBytes = 24 << 10;  // packed windows that stay in the first-level cache

// Columns are cut into equal tiles of at most 8, which leaves every accumulator in a register.
inline int64_t tile_of(int64_t width) { return parts(width, parts(width, 8)); }
inline int64_t padded_width(int64_t width) { return parts(width, 8) * tile_of(width); }

// Windows that are computed together share what they load of the table.
constexpr int64_t kMostWindows = 12;

}  // namespace

#if defined(__x86_64__) || defined(_M_X64)
#define SPOTLIGHTS_X86 1
#endif

#define LEVEL baseline
#define LANES 8
#define REGISTERS 8
#include "wbmm_body.inc"
#undef LEVEL
#undef LANES
#undef REGISTERS

// Compilers without this pragma build the baseline alone.
#if SPOTLIGHTS_X86 && defined(__GNUC__) && !defined(__clang__)
#define SPOTLIGHTS_DISPATCH 1
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define LEVEL avx2
#define LANES 8
#define REGISTERS 16
#include "wbmm_body.inc"
#undef LEVEL
#undef LANES
#undef REGISTERS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,prefer-vector-width=512")
#define LEVEL avx512
#define LANES 16
#define REGISTERS 32
#include "wbmm_body.inc"
#undef LEVEL
#undef LANES
#undef REGISTERS
#pragma GCC pop_options
#endif

namespace {

struct Pack {
    const float* table;
    float* packed;
    int64_t channels, wh, ww, lanes;
    bool turned, shortcut;
};

void pack_blocks(int64_t begin, int64_t end, void* context) {
    const Pack& p = *static_cast<const Pack*>(context);
    const int64_t offsets = (2 * p.wh - 1) * (2 * p.ww - 1);
    for (int64_t block = begin; block < end; block++) {
        float* out = p.packed + block * offsets * p.lanes;
        const int64_t used = least(p.lanes, p.channels - block * p.lanes);
        if (used < p.lanes) memset(out, 0, offsets * p.lanes * sizeof(float));
        for (int64_t lane = 0; lane < used; lane++) {
            const float* row = p.table + (block * p.lanes + lane) * offsets;
            for (int64_t k = 0; k < offsets; k++) out[k * p.lanes + lane] = row[p.turned ? offsets - 1 - k : k];
            if (p.shortcut) out[(offsets / 2) * p.lanes + lane] += 1;
        }
    }
}

// Adds the chunks up, in their order, and lays the sums out as the table.
void reduce_blocks(int64_t begin, int64_t end, void* context) {
    const Gradient& f = *static_cast<const Gradient*>(context);
    const spotlights_wbmm_shape& s = f.shape;
    const int64_t blocks = parts(s.channels, f.lanes), rows = 2 * s.wh - 1, columns = 2 * s.ww - 1;
    const int64_t size = rows * f.sums.columns * f.lanes, margin = f.sums.columns / 2 - (s.ww - 1);
    for (int64_t block = begin; block < end; block++) {
        float* first = f.partial + block * size;
        for (int64_t chunk = 1; chunk < f.chunks; chunk++) {
            const float* next = f.partial + (chunk * blocks + block) * size;
            for (int64_t k = 0; k < size; k++) first[k] += next[k];
        }
        for (int64_t lane = 0; lane < least(f.lanes, s.channels - block * f.lanes); lane++) {
            float* out = f.gradient + (block * f.lanes + lane) * rows * columns;
            for (int64_t i = 0; i < rows; i++)
                for (int64_t j = 0; j < columns; j++)
                    out[i * columns + j] = first[(i * f.sums.columns + margin + j) * f.lanes + lane];
        }
    }
}

int64_t lanes_of(int32_t level) { return level == SPOTLIGHTS_AVX512 ? 16 : 8; }

int32_t finish(int32_t code) { return code == 0 ? SPOTLIGHTS_OK : SPOTLIGHTS_THREADS; }

}  // namespace

int32_t spotlights_serial_for(int64_t begin, int64_t end, int64_t, void (*body)(int64_t, int64_t, void*),
                              void* context) {
    if (begin < end) body(begin, end, context);
    return 0;
}

int32_t spotlights_best_level(void) {
#if SPOTLIGHTS_DISPATCH
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw"))
        return SPOTLIGHTS_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return SPOTLIGHTS_AVX2;
#endif
    return SPOTLIGHTS_BASELINE;
}

int64_t spotlights_wbmm_packed_size(int32_t level, int64_t channels, int64_t wh, int64_t ww) {
    const int64_t lanes = lanes_of(level);
    return parts(channels, lanes) * lanes * (2 * wh - 1) * (2 * ww - 1);
}

int32_t spotlights_wbmm_pack_f32(spotlights_parallel_for run, int32_t level, const float* table, int64_t channels,
                                 int64_t wh, int64_t ww, int32_t turned, int32_t shortcut, float* packed) {
    if (channels < 0 || wh < 1 || ww < 1) return SPOTLIGHTS_BAD_ARGUMENT;
    Pack p{table, packed, channels, wh, ww, lanes_of(level), turned != 0, shortcut != 0};
    return finish(run(0, parts(channels, p.lanes), 1, pack_blocks, &p));
}

int32_t spotlights_wbmm_forward_f32(spotlights_parallel_for run, int32_t level, const spotlights_wbmm_shape* shape,
                                    const float* input, const int64_t* input_stride, const float* packed,
                                    const float* bias, float* output, const int64_t* output_stride) {
    const spotlights_wbmm_shape& s = *shape;
    if (s.batch < 0 || s.channels < 0 || s.height < 0 || s.width < 0 || s.wh < 1 || s.ww < 1)
        return SPOTLIGHTS_BAD_ARGUMENT;
    if (s.batch * s.channels * s.height * s.width == 0) return SPOTLIGHTS_OK;
    Forward f{s, input, output, packed, bias, {}, {}, 1, {}, 0};
    memcpy(f.x_stride, input_stride, sizeof f.x_stride);
    memcpy(f.y_stride, output_stride, sizeof f.y_stride);
    f.layout = {f.x_stride[1], f.x_stride[2], f.y_stride[1], f.y_stride[2], s.wh, s.ww};
    // An item of work is one block of channels in a strip of windows across the map, or in several short strips.
    f.strips = parts(4, parts(s.width, s.ww));
    const int64_t items = parts(s.batch * parts(s.height, s.wh), f.strips) * parts(s.channels, lanes_of(level));
    void (*body)(int64_t, int64_t, void*) = baseline::forward;
#if SPOTLIGHTS_DISPATCH
    if (level == SPOTLIGHTS_AVX2) body = avx2::forward;
    if (level == SPOTLIGHTS_AVX512) body = avx512::forward;
#endif
    const int32_t code = run(0, items, 1, body, &f);
    return f.no_memory ? SPOTLIGHTS_NO_MEMORY : finish(code);
}

int32_t spotlights_wbmm_weight_gradient_f32(spotlights_parallel_for run, int32_t level,
                                            const spotlights_wbmm_shape* shape, const float* grad_output,
                                            const int64_t* grad_stride, const float* input, const int64_t* input_stride,
                                            float* gradient) {
    const spotlights_wbmm_shape& s = *shape;
    if (s.batch < 1 || s.channels < 1 || s.height < 1 || s.width < 1 || s.wh < 1 || s.ww < 1)
        return SPOTLIGHTS_BAD_ARGUMENT;
    Gradient f{s, input, grad_output, {}, {}, 1, nullptr, gradient, {}, lanes_of(level), 0};
    memcpy(f.x_stride, input_stride, sizeof f.x_stride);
    memcpy(f.g_stride, grad_stride, sizeof f.g_stride);
    f.sums = {s.wh, 2 * padded_width(s.ww) - 1};
    const int64_t blocks = parts(s.channels, f.lanes);
    const int64_t windows = s.batch * parts(s.height, s.wh) * parts(s.width, s.ww);
    // Enough items for many threads, from the shape alone: results do not depend on the number of threads.
    f.chunks = least(parts(64, blocks), parts(windows, 8));
    const int64_t size = f.chunks * blocks * (2 * s.wh - 1) * f.sums.columns * f.lanes;
    f.partial = allocate(size);
    if (!f.partial) return SPOTLIGHTS_NO_MEMORY;
    void (*body)(int64_t, int64_t, void*) = baseline::weight_gradient;
#if SPOTLIGHTS_DISPATCH
    if (level == SPOTLIGHTS_AVX2) body = avx2::weight_gradient;
    if (level == SPOTLIGHTS_AVX512) body = avx512::weight_gradient;
#endif
    int32_t code = run(0, f.chunks * blocks, 1, body, &f);
    if (code == 0 && !f.no_memory) code = run(0, blocks, 1, reduce_blocks, &f);
    free(f.partial);
    return f.no_memory ? SPOTLIGHTS_NO_MEMORY : finish(code);
}
