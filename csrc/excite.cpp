#include <cmath>

#include "common.h"

namespace {

// Maps are cut into chunks of rows by their shape alone, so that sums do not depend on the number of threads.
struct Excite {
    int64_t rows, channels, width, reduced;  // `width`: the channels, rounded up to full vectors
    int64_t chunk_rows, chunks;
    const void *x, *weight1, *weight2;
    const float *scale, *shift, *bias1, *bias2;
    void* y;
    const void* residual;
    float *sums, *hidden, *factor, *summand;  // per chunk; per image
};

constexpr int64_t kChunk = 1 << 14;  // numbers

}  // namespace

#define BODY "excite.inc"
#include "levels.inc"

namespace {

typedef void (*Loop)(int64_t, int64_t, void*);

struct Kernels {
    int64_t lanes;
    Loop sum[2], gate[2], excite[2], scale_add[2];
};

#define KERNELS(level)                                                                             \
    Kernels {                                                                                      \
        sizeof(level::vec) / 4, {level::sum_chunks<float>, level::sum_chunks<bfloat16>},           \
            {level::gate_images<float>, level::gate_images<bfloat16>},                             \
            {level::excite_chunks<float>, level::excite_chunks<bfloat16>},                         \
            {level::scale_add_chunks<float>, level::scale_add_chunks<bfloat16>}                    \
    }

Kernels kernels_of(int32_t level) {
#if SPOTLIGHTS_DISPATCH
    if (level >= SPOTLIGHTS_AVX512) return KERNELS(avx512);
    if (level == SPOTLIGHTS_AVX2) return KERNELS(avx2);
#else
    (void)level;
#endif
    return KERNELS(baseline);
}

Excite excite_of(const Kernels& k, int64_t rows, int64_t channels, const void* input, void* output) {
    Excite e{};
    e.rows = rows;
    e.channels = channels;
    e.width = parts(channels, k.lanes) * k.lanes;
    e.chunk_rows = parts(kChunk, channels);
    e.chunks = parts(rows, e.chunk_rows);
    e.x = input;
    e.y = output;
    return e;
}

}  // namespace

int32_t spotlights_squeeze_excite(spotlights_parallel_for run, int32_t level, int32_t dtype, int64_t batch, int64_t rows,
                                  int64_t channels, int64_t reduced, const void* input, const float* scale,
                                  const float* shift, const void* weight1, const float* bias1, const void* weight2,
                                  const float* bias2, void* output) {
    if (!valid_map(dtype, batch, rows, channels) || reduced < 0) return SPOTLIGHTS_BAD_ARGUMENT;
    if (batch * rows * channels == 0) return SPOTLIGHTS_OK;
    const Kernels k = kernels_of(level);
    Excite e = excite_of(k, rows, channels, input, output);
    e.reduced = reduced;
    e.scale = scale;
    e.shift = shift;
    e.weight1 = weight1;
    e.bias1 = bias1;
    e.weight2 = weight2;
    e.bias2 = bias2;
    const int64_t sums = batch * e.chunks * e.width, factors = batch * e.width;
    e.sums = allocate(sums + 2 * factors + batch * reduced);
    if (!e.sums) return SPOTLIGHTS_NO_MEMORY;
    e.factor = e.sums + sums;
    e.summand = e.factor + factors;
    e.hidden = e.summand + factors;
    int32_t code = run(0, batch * e.chunks, 1, k.sum[dtype], &e);
    if (code == 0) code = run(0, batch, 1, k.gate[dtype], &e);
    if (code == 0) code = run(0, batch * e.chunks, 1, k.excite[dtype], &e);
    free(e.sums);
    return finish(code);
}

int32_t spotlights_scale_add(spotlights_parallel_for run, int32_t level, int32_t dtype, int64_t batch, int64_t rows,
                             int64_t channels, const void* input, const float* scale, const float* shift,
                             const void* residual, void* output) {
    if (!valid_map(dtype, batch, rows, channels)) return SPOTLIGHTS_BAD_ARGUMENT;
    if (batch * rows * channels == 0) return SPOTLIGHTS_OK;
    const Kernels k = kernels_of(level);
    Excite e = excite_of(k, rows, channels, input, output);
    e.scale = scale;
    e.shift = shift;
    e.residual = residual;
    return finish(run(0, batch * e.chunks, 1, k.scale_add[dtype], &e));
}
