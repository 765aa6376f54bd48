// Checks the CPU library against plain loops at every instruction set that this processor runs; prints the worst
// relative error and returns 1 where it is too large. Buffers are of exact size, so that sanitizers see every overrun.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../../csrc/wbmm.h"

static std::vector<float> random_floats(size_t count, unsigned seed) {
    std::vector<float> values(count);
    unsigned state = seed * 2654435761u + 1;
    for (float& value : values) {
        state = state * 1664525u + 1013904223u;
        value = (state >> 8) / 8388608.0f - 1;
    }
    return values;
}

struct Case {
    int64_t batch, channels, height, width, wh, ww;
};

static double check(const Case& c, int32_t level) {
    const int64_t offsets = (2 * c.wh - 1) * (2 * c.ww - 1), cells = c.batch * c.height * c.width;
    const auto x = random_floats(cells * c.channels, 1), g = random_floats(cells * c.channels, 2);
    const auto table = random_floats(c.channels * offsets, 3), bias = random_floats(c.channels, 4);
    std::vector<double> y(cells * c.channels), gradient(c.channels * offsets);
    for (int64_t b = 0; b < c.batch; b++)
        for (int64_t h = 0; h < c.height; h++)
            for (int64_t w = 0; w < c.width; w++)
                for (int64_t k = 0; k < c.channels; k++) {
                    const int64_t o = ((b * c.height + h) * c.width + w) * c.channels + k;
                    y[o] = bias[k] + x[o];
                    const int64_t top = h / c.wh * c.wh, left = w / c.ww * c.ww;
                    for (int64_t i = top; i < top + c.wh && i < c.height; i++)
                        for (int64_t j = left; j < left + c.ww && j < c.width; j++) {
                            const int64_t at = ((b * c.height + i) * c.width + j) * c.channels + k;
                            const int64_t offset = (i - h + c.wh - 1) * (2 * c.ww - 1) + j - w + c.ww - 1;
                            y[o] += double(x[at]) * table[k * offsets + offset];
                            gradient[k * offsets + offset] += double(x[at]) * g[o];
                        }
                }
    const int64_t stride[3] = {c.height * c.width * c.channels, c.width * c.channels, c.channels};
    const spotlights_wbmm_shape shape = {c.batch, c.channels, c.height, c.width, c.wh, c.ww};
    const int64_t size = spotlights_wbmm_packed_size(level, c.channels, c.wh, c.ww);
    float* packed = static_cast<float*>(aligned_alloc(64, (size * 4 + 63) / 64 * 64));
    std::vector<float> output(cells * c.channels, NAN), weights(c.channels * offsets, NAN);
    int32_t code = spotlights_wbmm_pack_f32(spotlights_serial_for, level, table.data(), c.channels, c.wh, c.ww, 0, 1, packed);
    code |= spotlights_wbmm_forward_f32(spotlights_serial_for, level, &shape, x.data(), stride, packed, bias.data(),
                                        output.data(), stride);
    code |= spotlights_wbmm_weight_gradient_f32(spotlights_serial_for, level, &shape, g.data(), stride, x.data(), stride,
                                                weights.data());
    free(packed);
    if (code) return INFINITY;
    double error = 0, largest = 0, worst = 0;
    for (size_t n = 0; n < y.size(); n++) {
        error = std::fmax(error, std::isnan(output[n]) ? INFINITY : std::fabs(output[n] - y[n]));
        largest = std::fmax(largest, std::fabs(y[n]));
    }
    worst = error / largest;
    error = largest = 0;
    for (size_t n = 0; n < gradient.size(); n++) {
        error = std::fmax(error, std::isnan(weights[n]) ? INFINITY : std::fabs(weights[n] - gradient[n]));
        largest = std::fmax(largest, std::fabs(gradient[n]));
    }
    return std::fmax(worst, error / largest);
}

int main() {
    const Case cases[] = {{2, 32, 14, 21, 7, 7},   {1, 20, 13, 20, 5, 9},  {2, 5, 30, 17, 14, 14}, {1, 16, 20, 33, 16, 16},
                          {3, 33, 9, 50, 3, 20},   {5, 16, 20, 13, 14, 14}, {3, 17, 13, 5, 7, 7},  {1, 24, 24, 23, 8, 8},
                          {3, 8, 12, 12, 12, 12},  {1, 1, 1, 1, 7, 7},     {2, 3, 5, 70, 2, 33},  {2, 9, 1, 1, 1, 1}};
    double worst = 0;
    for (int32_t level = 0; level <= spotlights_best_level(); level++)
        for (const Case& c : cases) worst = std::fmax(worst, check(c, level));
    std::printf("levels %d, worst relative error %.2e\n", spotlights_best_level() + 1, worst);
    return worst < 5e-6 ? 0 : 1;
}
