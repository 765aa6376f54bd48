// The CPU library's interface: plain C, no torch headers, so that one build serves every Python and torch.
//
// Maps are float32 or bfloat16 with any strides, in elements, in the order batch, channel, row, column; side by side
// channels (channels-last) are fastest. Tables are float32, (C, 2*wh-1, 2*ww-1), contiguous. Functions return 0, or a
// code of `enum spotlights_error`.
#pragma once
#include <cstdint>

extern "C" {

typedef int32_t (*spotlights_parallel_for)(int64_t begin, int64_t end, int64_t grain,
                                           void (*body)(int64_t begin, int64_t end, void* context), void* context);

// The same on the calling thread alone, for processes without the thread pool.
int32_t spotlights_serial_for(int64_t begin, int64_t end, int64_t grain,
                              void (*body)(int64_t begin, int64_t end, void* context), void* context);

enum spotlights_error { SPOTLIGHTS_OK = 0, SPOTLIGHTS_BAD_ARGUMENT = 1, SPOTLIGHTS_NO_MEMORY = 2, SPOTLIGHTS_THREADS = 3 };

// Instruction sets, best last; `spotlights_best_level` is the best that this processor runs.
enum spotlights_level { SPOTLIGHTS_BASELINE = 0, SPOTLIGHTS_AVX2 = 1, SPOTLIGHTS_AVX512 = 2, SPOTLIGHTS_AVX512_BF16 = 3, SPOTLIGHTS_AMX = 4 };
int32_t spotlights_best_level(void);

// Whether bfloat16 dot products, measured here for some microseconds, beat float32 multiply-adds on this processor: the
// last level differs from the one before in that alone.
int32_t spotlights_dots_pay(void);

enum spotlights_dtype { SPOTLIGHTS_FLOAT32 = 0, SPOTLIGHTS_BFLOAT16 = 1 };

struct spotlights_wbmm_shape {
    int64_t batch, channels, height, width;
    int64_t wh, ww;  // window
    int64_t lh, lw;  // sub-window of the second table; the window itself where there is none
};

// Floats that `spotlights_wbmm_pack` writes, and that `packed` holds below.
int64_t spotlights_wbmm_packed_size(int32_t level, const spotlights_wbmm_shape* shape);

// Lays the tables out for a level: by blocks of channels, each offset's channels side by side. `local`, (C, 2*lh-1,
// 2*lw-1) or null, is added between positions of one sub-window. `turned` turns both about their centres (the
// operator's transpose, for input gradients); `shortcut` adds 1 at the centre. `dtype` is that of the maps.
int32_t spotlights_wbmm_pack(spotlights_parallel_for run, int32_t level, const spotlights_wbmm_shape* shape,
                             int32_t dtype, const float* table, const float* local, int32_t turned, int32_t shortcut, float* packed);

// `threads` that the runner has bear on how work is cut, not on the result.
int32_t spotlights_wbmm_forward(spotlights_parallel_for run, int32_t level, const spotlights_wbmm_shape* shape,
                                int32_t dtype, const void* input, const int64_t* input_stride, const float* packed,
                                const float* bias, void* output, const int64_t* output_stride, int32_t threads);

// The gradient of the table of window (wh, ww), float32, from the output's gradient and the input.
int32_t spotlights_wbmm_weight_gradient(spotlights_parallel_for run, int32_t level, const spotlights_wbmm_shape* shape,
                                        int32_t dtype, const void* grad_output, const int64_t* grad_stride,
                                        const void* input, const int64_t* input_stride, float* gradient);

// y = GELU(input + shift) of a contiguous map (batch, rows, channels), its positions being the rows, and global response
// normalisation of that: y * (1 + weight * n) + bias, n = |y| / (mean |y| + eps), |y| being the norm over the rows.
// `shift` and `bias`, (channels), may be null; `output` may be the input. `norm`, (batch, channels), receives |y|. The
// numbers of an empty map are not written.
int32_t spotlights_gelu_response(spotlights_parallel_for run, int32_t level, int32_t dtype, int64_t batch, int64_t rows,
                                 int64_t channels, const void* input, const float* shift, const float* weight,
                                 const float* bias, float eps, void* output, float* norm, int32_t threads);

// What its gradients are made of: sums over the rows, (batch, channels), of grad * GELU(input + shift) and of grad...
int32_t spotlights_gelu_response_sums(spotlights_parallel_for run, int32_t level, int32_t dtype, int64_t batch,
                                      int64_t rows, int64_t channels, const void* grad, const void* input,
                                      const float* shift, float* along, float* total);

// ... and, with z = input + shift, the input's: (grad * scale + GELU(z) * pull) * GELU'(z), `scale` and `pull` being
// (batch, channels). `response`, if not null, receives GELU(z) * scale + bias, with the step's own scale its output.
// `output` may be `grad`, `response` the input.
int32_t spotlights_gelu_response_gradient(spotlights_parallel_for run, int32_t level, int32_t dtype, int64_t batch,
                                          int64_t rows, int64_t channels, const void* grad, const void* input,
                                          const float* shift, const float* bias, const float* scale, const float* pull,
                                          void* output, void* response);

// Squeeze and excite of y = input * scale + shift, a contiguous map as above: y * sigmoid(W2 relu(W1 mean(y) + b1) + b2),
// the mean being over the rows. W1 is (reduced, channels), W2 (channels, reduced), in the map's dtype; `scale` and
// `shift`, (channels), may both be null; `output` may be the input.
int32_t spotlights_squeeze_excite(spotlights_parallel_for run, int32_t level, int32_t dtype, int64_t batch, int64_t rows,
                                  int64_t channels, int64_t reduced, const void* input, const float* scale,
                                  const float* shift, const void* weight1, const float* bias1, const void* weight2,
                                  const float* bias2, void* output);

// input * scale + shift + residual, maps as above; `scale` and `shift` may be null, `output` the input or the residual.
int32_t spotlights_scale_add(spotlights_parallel_for run, int32_t level, int32_t dtype, int64_t batch, int64_t rows,
                             int64_t channels, const void* input, const float* scale, const float* shift,
                             const void* residual, void* output);

// Runs `iterations` of 12 independent multiply-adds on full vectors in every one of `tasks` tasks, and returns how many
// multiply-adds (of single numbers) that is: the roof of the kernels above.
int64_t spotlights_multiply_adds(spotlights_parallel_for run, int32_t level, int64_t tasks, int64_t iterations);
}
