#include <cmath>

#include "common.h"

namespace {

// The rows of an image are cut into chunks by the shape alone, so that sums do not depend on the number of threads.
struct Response {
    int64_t rows, channels, width;  // `width`: the channels, rounded up to full vectors
    int64_t chunk_rows, chunks, image;
    const void* x;
    void* y;
    const float *shift, *weight, *bias;
    float eps, *norm, *sums;
    int32_t no_memory;
};

struct Gradient {
    int64_t rows, channels, width, chunk_rows, chunks;
    const void *grad, *x;
    void *grad_x, *response;
    const float *shift, *bias, *scale, *pull;
    float *along, *total, *sums;
};

constexpr int64_t kChunk = 1 << 13;          // numbers
constexpr int64_t kGradientChunk = 1 << 16;  // whose sums, of all images, exist at once

}  // namespace

#define BODY "response.inc"
#include "levels.inc"

namespace {

typedef void (*Loop)(int64_t, int64_t, void*);

struct Kernels {
    int64_t lanes;
    Loop gelu[2], scale[2], whole[2];
    void (*response_scale)(const Response&, float*, float*);
    Loop sum[2], reduce, gradient[2];
};

#define KERNELS(level)                                                                                            \
    Kernels {                                                                                                     \
        sizeof(level::vec) / 4, {level::gelu_chunks<float>, level::gelu_chunks<bfloat16>},                        \
            {level::scale_chunks<float>, level::scale_chunks<bfloat16>},                                          \
            {level::whole_images<float>, level::whole_images<bfloat16>}, level::response_scale,                   \
            {level::sum_chunks<float>, level::sum_chunks<bfloat16>}, level::reduce_images,                        \
            {level::input_gradient<float>, level::input_gradient<bfloat16>}                                       \
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

Gradient gradient_of(const Kernels& k, int64_t rows, int64_t channels, const void* grad, const void* input) {
    Gradient g{};
    g.rows = rows;
    g.channels = channels;
    g.width = parts(channels, k.lanes) * k.lanes;
    g.chunk_rows = parts(kGradientChunk, channels);
    g.chunks = parts(rows, g.chunk_rows);
    g.grad = grad;
    g.x = input;
    return g;
}

}  // namespace

int32_t spotlights_gelu_response(spotlights_parallel_for run, int32_t level, int32_t dtype, int64_t batch, int64_t rows,
                                 int64_t channels, const void* input, const float* shift, const float* weight,
                                 const float* bias, float eps, void* output, float* norm, int32_t threads) {
    if (!valid_map(dtype, batch, rows, channels) || threads < 1) return SPOTLIGHTS_BAD_ARGUMENT;
    if (batch * rows * channels == 0) return SPOTLIGHTS_OK;
    const Kernels k = kernels_of(level);
    Response r{};
    r.rows = rows;
    r.channels = channels;
    r.width = parts(channels, k.lanes) * k.lanes;
    r.chunk_rows = parts(parts(kChunk, channels), 4) * 4;
    r.chunks = parts(rows, r.chunk_rows);
    r.x = input;
    r.y = output;
    r.shift = shift;
    r.weight = weight;
    r.bias = bias;
    r.eps = eps;
    r.norm = norm;
    if (batch % threads == 0 || batch >= 4 * threads) {
        const int32_t code = run(0, batch, 1, k.whole[dtype], &r);
        return r.no_memory ? SPOTLIGHTS_NO_MEMORY : finish(code);
    }
    r.sums = allocate(r.chunks * r.width);
    if (!r.sums) return SPOTLIGHTS_NO_MEMORY;
    int32_t code = 0;
    for (; r.image < batch && code == 0; r.image++) {
        code = run(0, r.chunks, 1, k.gelu[dtype], &r);
        if (code) break;
        k.response_scale(r, r.sums, norm + r.image * channels);
        code = run(0, r.chunks, 1, k.scale[dtype], &r);
    }
    free(r.sums);
    return finish(code);
}

int32_t spotlights_gelu_response_sums(spotlights_parallel_for run, int32_t level, int32_t dtype, int64_t batch,
                                      int64_t rows, int64_t channels, const void* grad, const void* input,
                                      const float* shift, float* along, float* total) {
    if (!valid_map(dtype, batch, rows, channels)) return SPOTLIGHTS_BAD_ARGUMENT;
    if (batch * rows * channels == 0) return SPOTLIGHTS_OK;
    const Kernels k = kernels_of(level);
    Gradient g = gradient_of(k, rows, channels, grad, input);
    g.shift = shift;
    g.along = along;
    g.total = total;
    g.sums = allocate(batch * g.chunks * 2 * g.width);
    if (!g.sums) return SPOTLIGHTS_NO_MEMORY;
    int32_t code = run(0, batch * g.chunks, 1, k.sum[dtype], &g);
    if (code == 0) code = run(0, batch, 1, k.reduce, &g);
    free(g.sums);
    return finish(code);
}

int32_t spotlights_gelu_response_gradient(spotlights_parallel_for run, int32_t level, int32_t dtype, int64_t batch,
                                          int64_t rows, int64_t channels, const void* grad, const void* input,
                                          const float* shift, const float* bias, const float* scale,
                                          const float* pull, void* output, void* response) {
    if (!valid_map(dtype, batch, rows, channels)) return SPOTLIGHTS_BAD_ARGUMENT;
    if (batch * rows * channels == 0) return SPOTLIGHTS_OK;
    const Kernels k = kernels_of(level);
    Gradient g = gradient_of(k, rows, channels, grad, input);
    g.shift = shift;
    g.scale = scale;
    g.pull = pull;
    g.grad_x = output;
    g.bias = bias;
    g.response = response;
    return finish(run(0, batch * g.chunks, 1, k.gradient[dtype], &g));
}
