// The CPU library's interface: plain C, no torch headers, so that one build serves every Python and torch.
//
// Maps are channels-last float32: element (b, h, w, c) lies at b*stride[0] + h*stride[1] + w*stride[2] + c.
// A table of window (wh, ww) is (C, 2*wh-1, 2*ww-1), contiguous. Functions return 0, or a code of `enum Error`.
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
enum spotlights_level { SPOTLIGHTS_BASELINE = 0, SPOTLIGHTS_AVX2 = 1, SPOTLIGHTS_AVX512 = 2 };
int32_t spotlights_best_level(void);

struct spotlights_wbmm_shape {
    int64_t batch, channels, height, width;
    int64_t wh, ww;  // window
};

// Floats that `spotlights_wbmm_pack_f32` writes, and that `packed` holds below.
int64_t spotlights_wbmm_packed_size(int32_t level, int64_t channels, int64_t wh, int64_t ww);

// Lays the table out for a level: by blocks of channels, each offset's channels side by side. `turned` turns it about
// its centre (the operator's transpose, for input gradients); `shortcut` adds 1 at the centre.
int32_t spotlights_wbmm_pack_f32(spotlights_parallel_for run, int32_t level, const float* table, int64_t channels,
                                 int64_t wh, int64_t ww, int32_t turned, int32_t shortcut, float* packed);

int32_t spotlights_wbmm_forward_f32(spotlights_parallel_for run, int32_t level, const spotlights_wbmm_shape* shape,
                                    const float* input, const int64_t* input_stride, const float* packed,
                                    const float* bias, float* output, const int64_t* output_stride);

// The table's gradient, (C, 2*wh-1, 2*ww-1), from the output's gradient and the input.
int32_t spotlights_wbmm_weight_gradient_f32(spotlights_parallel_for run, int32_t level,
                                            const spotlights_wbmm_shape* shape, const float* grad_output,
                                            const int64_t* grad_stride, const float* input, const int64_t* input_stride,
                                            float* gradient);
}
