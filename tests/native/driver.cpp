// Checks the CPU library against plain loops at every instruction set that this processor runs; prints the worst
// relative error and returns 1 where it is too large. Buffers are of exact size, so that sanitizers see every overrun,
// and outputs start as NaN, so that a value never written is seen.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../../csrc/wbmm.h"

typedef uint16_t bfloat16;

static double to_double(float value) { return value; }
static double to_double(bfloat16 value) {
    const uint32_t bits = uint32_t(value) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
static void assign(float& to, double value) { to = float(value); }
static void assign(bfloat16& to, double value) {
    const float narrow = float(value);
    uint32_t bits;
    memcpy(&bits, &narrow, 4);
    to = bfloat16(std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Numbers in [-1, 1) that a T holds.
template <typename T>
static std::vector<double> random_numbers(size_t count, unsigned seed) {
    std::vector<double> values(count);
    unsigned state = seed * 2654435761u + 1;
    for (double& value : values) {
        state = state * 1664525u + 1013904223u;
        T held;
        assign(held, (state >> 8) / 8388608.0 - 1);
        value = to_double(held);
    }
    return values;
}

// The items one by one, the last first: none may need another.
static int32_t backwards_for(int64_t begin, int64_t end, int64_t, void (*body)(int64_t, int64_t, void*), void* data) {
    while (end-- > begin) body(end, end + 1, data);
    return 0;
}

struct Case {
    int64_t batch, channels, height, width, wh, ww, lh, lw;
};

static double worst = 0;

// `rounding`: the part of a value that its dtype may lose.
static void compare(const char* what, const Case& c, int32_t level, double actual, double expected, double largest,
                    double rounding, bool& failed) {
    double error = (std::fabs(actual - expected) - rounding * std::fabs(expected)) / (largest + 1e-30);
    if (std::isnan(error)) error = INFINITY;
    worst = std::fmax(worst, error);
    if (error < 5e-6 || failed) return;
    failed = true;
    std::printf("level %d: %s: got %g, expected %g: map %lld %lld %lld %lld, window %lld %lld, sub-window %lld %lld\n",
                level, what, actual, expected, (long long)c.batch, (long long)c.channels, (long long)c.height,
                (long long)c.width, (long long)c.wh, (long long)c.ww, (long long)c.lh, (long long)c.lw);
}

static double largest_of(const std::vector<double>& values) {
    double largest = 0;
    for (double value : values) largest = std::fmax(largest, std::fabs(value));
    return largest;
}

// One set of numbers, in the order batch, channel, row, column, and what the definition makes of it.
template <typename T>
struct Problem {
    static constexpr int32_t dtype = sizeof(T) == 4 ? SPOTLIGHTS_FLOAT32 : SPOTLIGHTS_BFLOAT16;
    const Case c;
    const bool two_tables = c.lh != c.wh || c.lw != c.ww;
    const int64_t cells = c.batch * c.channels * c.height * c.width, columns = 2 * c.ww - 1;
    const int64_t entries = (2 * c.wh - 1) * columns, local_entries = (2 * c.lh - 1) * (2 * c.lw - 1);
    const std::vector<double> x = random_numbers<T>(cells, 1), g = random_numbers<T>(cells, 2);
    const std::vector<double> table = random_numbers<float>(c.channels * entries, 3);
    const std::vector<double> local = random_numbers<float>(c.channels * local_entries, 4);
    const std::vector<double> bias = random_numbers<float>(c.channels, 5);
    std::vector<double> plain = x, turned = x;  // the shortcut
    std::vector<double> gradient = std::vector<double>(c.channels * entries);

    explicit Problem(const Case& c) : c(c) {
        for (int64_t map = 0; map < c.batch * c.channels; map++)
            for (int64_t h = 0; h < c.height; h++)
                for (int64_t w = 0; w < c.width; w++) add(map, h, w);
    }

    void add(int64_t map, int64_t h, int64_t w) {
        const int64_t k = map % c.channels, o = (map * c.height + h) * c.width + w;
        plain[o] += bias[k];
        for (int64_t i = h / c.wh * c.wh; i < (h / c.wh + 1) * c.wh && i < c.height; i++)
            for (int64_t j = w / c.ww * c.ww; j < (w / c.ww + 1) * c.ww && j < c.width; j++) {
                const double value = x[(map * c.height + i) * c.width + j];
                const int64_t offset = (i - h + c.wh - 1) * columns + j - w + c.ww - 1;
                plain[o] += value * table[k * entries + offset];
                turned[o] += value * table[(k + 1) * entries - 1 - offset];
                gradient[k * entries + offset] += value * g[o];
                // Sub-windows divide the window, so those of the map and those of the window are the same.
                if (!two_tables || h / c.lh != i / c.lh || w / c.lw != j / c.lw) continue;
                const int64_t near = (i - h + c.lh - 1) * (2 * c.lw - 1) + j - w + c.lw - 1;
                plain[o] += value * local[k * local_entries + near];
                turned[o] += value * local[(k + 1) * local_entries - 1 - near];
            }
    }

    // A map in memory: channels-last or NCHW.
    struct Map {
        std::vector<T> values;
        int64_t stride[4];
    };
    int64_t place(const Map& map, int64_t n) const {
        const int64_t w = n % c.width, h = n / c.width % c.height, k = n / c.width / c.height % c.channels;
        return n / (c.width * c.height * c.channels) * map.stride[0] + k * map.stride[1] + h * map.stride[2] +
               w * map.stride[3];
    }
    Map map_of(const std::vector<double>& numbers, bool last) const {
        Map map{std::vector<T>(cells), {c.channels * c.height * c.width, c.height * c.width, c.width, 1}};
        if (last) map.stride[1] = 1, map.stride[2] = c.width * c.channels, map.stride[3] = c.channels;
        for (int64_t n = 0; n < cells; n++) assign(map.values[place(map, n)], numbers[n]);
        return map;
    }

    bool forward(int32_t level, bool x_last, bool y_last, bool turn) const {
        const spotlights_wbmm_shape shape = {c.batch, c.channels, c.height, c.width, c.wh, c.ww, c.lh, c.lw};
        const std::vector<float> t(table.begin(), table.end()), l(local.begin(), local.end());
        const std::vector<float> b(bias.begin(), bias.end());
        const Map in = map_of(x, x_last);
        Map out = map_of(std::vector<double>(cells, NAN), y_last);
        const int64_t size = spotlights_wbmm_packed_size(level, &shape);
        void* packed = nullptr;
        if (posix_memalign(&packed, 64, size * sizeof(float))) std::abort();
        memset(packed, 0xff, size * sizeof(float));
        const auto run = turn ? backwards_for : spotlights_serial_for;
        float* const p = static_cast<float*>(packed);
        int32_t code = spotlights_wbmm_pack(run, level, &shape, dtype, t.data(), two_tables ? l.data() : nullptr, turn, 1, p);
        code |= spotlights_wbmm_forward(run, level, &shape, dtype, in.values.data(), in.stride, p,
                                        turn ? nullptr : b.data(), out.values.data(), out.stride, turn ? 64 : 1);
        free(packed);
        const std::vector<double>& expected = turn ? turned : plain;
        // Dot products and matrix units round the table to bfloat16 too.
        const double slack = sizeof(T) == 2 && level >= SPOTLIGHTS_AVX512_BF16 ? 1000 : 1;
        const double largest = slack * largest_of(expected), rounding = sizeof(T) == 4 ? 0 : 1 / 256.0;
        bool failed = false;
        for (int64_t n = 0; n < cells; n++)
            compare(turn ? "turned output" : "output", c, level, code ? NAN : to_double(out.values[place(out, n)]),
                    expected[n], largest, rounding, failed);
        return !failed;
    }

    bool weight_gradient(int32_t level, bool x_last, bool g_last) const {
        const spotlights_wbmm_shape shape = {c.batch, c.channels, c.height, c.width, c.wh, c.ww, c.lh, c.lw};
        const Map in = map_of(x, x_last), upstream = map_of(g, g_last);
        std::vector<float> weights(c.channels * entries, NAN);
        const int32_t code =
            spotlights_wbmm_weight_gradient(g_last ? spotlights_serial_for : backwards_for, level, &shape, dtype,
                                            upstream.values.data(), upstream.stride, in.values.data(), in.stride,
                                            weights.data());
        if (two_tables) return code == SPOTLIGHTS_BAD_ARGUMENT;
        const double largest = largest_of(gradient);
        bool failed = false;
        for (size_t n = 0; n < weights.size(); n++)
            compare("weight gradient", c, level, code ? NAN : weights[n], gradient[n], largest, 0, failed);
        return !failed;
    }

    bool check() const {
        bool right = true;
        for (int32_t level = 0; level <= spotlights_best_level(); level++)
            for (int layouts = 0; layouts < 4; layouts++) {
                for (int turn = 0; turn < 2; turn++) right &= forward(level, layouts & 1, layouts & 2, turn);
                right &= weight_gradient(level, layouts & 1, layouts & 2);
            }
        return right;
    }
};

// GELU and response normalisation of a map (batch, rows, channels) and a shift, in place and not, with a bias and without.
template <typename T>
static bool response(int64_t batch, int64_t rows, int64_t channels) {
    constexpr int32_t dtype = sizeof(T) == 4 ? SPOTLIGHTS_FLOAT32 : SPOTLIGHTS_BFLOAT16;
    const Case c{batch, channels, rows, 1, 1, 1, 1, 1};
    const size_t cells = batch * rows * channels;
    std::vector<double> x = random_numbers<T>(cells, 6);
    for (double& value : x) value *= 4;  // exact
    const std::vector<double> weight = random_numbers<float>(channels, 7), bias = random_numbers<float>(channels, 8);
    const std::vector<double> before = random_numbers<float>(channels, 9);
    const std::vector<float> w(weight.begin(), weight.end()), b(bias.begin(), bias.end()), s(before.begin(), before.end());
    std::vector<double> expected(cells), norms(batch * channels);
    for (int64_t image = 0; image < batch; image++) {
        double* norm = norms.data() + image * channels;
        double mean = 0;
        for (size_t n = image * rows * channels; n < size_t((image + 1) * rows * channels); n++) {
            const double z = x[n] + before[n % channels];
            expected[n] = z * std::erfc(-z / std::sqrt(2.0)) / 2;
            norm[n % channels] += expected[n] * expected[n];
        }
        for (int64_t k = 0; k < channels; k++) mean += norm[k] = std::sqrt(norm[k]);
        mean = mean / channels + 1e-6;
        for (size_t n = image * rows * channels; n < size_t((image + 1) * rows * channels); n++)
            expected[n] *= 1 + weight[n % channels] * norm[n % channels] / mean;
    }
    bool failed = false;
    for (int32_t level = 0; level <= spotlights_best_level(); level++)
        for (int way = 0; way < 4; way++) {
            std::vector<T> in(cells), out(cells);
            for (size_t n = 0; n < cells; n++) assign(in[n], x[n]), assign(out[n], NAN);
            std::vector<float> norm(batch * channels, NAN);
            T* const to = way & 1 ? in.data() : out.data();
            const auto run = way & 2 ? backwards_for : spotlights_serial_for;
            const int32_t code =
                spotlights_gelu_response(run, level, dtype, batch, rows, channels, in.data(), s.data(), w.data(),
                                         way & 1 ? b.data() : nullptr, 1e-6f, to, norm.data(), way & 2 ? 64 : 1);
            // bfloat16 rounds twice, before the scale and after.
            const double rounding = sizeof(T) == 4 ? 0 : 1 / 100.0, largest = largest_of(expected) + 1;
            for (size_t n = 0; n < cells; n++) {
                const double shift = way & 1 ? bias[n % channels] : 0;
                compare("response", c, level, code ? NAN : to_double(to[n]) - shift, expected[n],
                        sizeof(T) == 4 ? largest : 1000 * largest, rounding, failed);
            }
            for (size_t n = 0; n < norm.size(); n++)
                compare("norm", c, level, norm[n], norms[n], norms[n] + 1, 0, failed);
        }
    return !failed;
}

// The sums and the input's gradient of that step.
template <typename T>
static bool response_gradient(int64_t batch, int64_t rows, int64_t channels) {
    constexpr int32_t dtype = sizeof(T) == 4 ? SPOTLIGHTS_FLOAT32 : SPOTLIGHTS_BFLOAT16;
    const Case c{batch, channels, rows, 1, 1, 1, 1, 1};
    const size_t cells = batch * rows * channels, sums = batch * channels;
    const std::vector<double> x = random_numbers<T>(cells, 6), grad = random_numbers<T>(cells, 7);
    const std::vector<double> scale = random_numbers<float>(sums, 8), pull = random_numbers<float>(sums, 9);
    const std::vector<double> before = random_numbers<float>(channels, 10);
    const std::vector<float> s(scale.begin(), scale.end()), p(pull.begin(), pull.end()), b(before.begin(), before.end());
    std::vector<double> along(sums), total(sums), expected(cells), response(cells);
    std::vector<T> in(cells), upstream(cells);
    for (size_t n = 0; n < cells; n++) {
        const size_t k = n / (rows * channels) * channels + n % channels;
        const double z = x[n] + before[n % channels], part = std::erfc(-z / std::sqrt(2.0)) / 2, y = z * part;
        const double slope = part + z * std::exp(-z * z / 2) / std::sqrt(2 * M_PI);
        along[k] += grad[n] * y;
        total[k] += grad[n];
        expected[n] = (grad[n] * scale[k] + y * pull[k]) * slope;
        response[n] = y * scale[k] + before[n % channels];
        assign(in[n], x[n]);
        assign(upstream[n], grad[n]);
    }
    const double largest_along = largest_of(along), largest_total = largest_of(total);
    bool failed = false;
    for (int32_t level = 0; level <= spotlights_best_level(); level++) {
        std::vector<float> found_along(sums, NAN), found_total(sums, NAN);
        std::vector<T> found(cells);
        for (T& value : found) assign(value, NAN);
        const auto run = level & 1 ? backwards_for : spotlights_serial_for;
        T *const a = upstream.data(), *const i = in.data();
        int32_t code = spotlights_gelu_response_sums(run, level, dtype, batch, rows, channels, a, i, b.data(),
                                                     found_along.data(), found_total.data());
        code |= spotlights_gelu_response_gradient(run, level, dtype, batch, rows, channels, a, i, b.data(), b.data(),
                                                  s.data(), p.data(), found.data(), level & 1 ? in.data() : nullptr);
        for (size_t n = 0; n < sums; n++) {
            compare("sum along", c, level, code ? NAN : found_along[n], along[n], largest_along + 1, 0, failed);
            compare("sum", c, level, code ? NAN : found_total[n], total[n], largest_total + 1, 0, failed);
        }
        for (size_t n = 0; n < cells; n++)
            compare("input gradient", c, level, code ? NAN : to_double(found[n]), expected[n], 2,
                    sizeof(T) == 4 ? 0 : 1 / 256.0, failed);
        if (!(level & 1)) continue;
        for (size_t n = 0; n < cells; n++) {
            compare("response", c, level, to_double(in[n]), response[n], 2, sizeof(T) == 4 ? 0 : 1 / 256.0, failed);
            assign(in[n], x[n]);
        }
    }
    return !failed;
}

// Squeeze and excite of a map (batch, rows, channels), scaled and shifted before or not, in place and not; and the map
// added, scaled, to its reverse.
template <typename T>
static bool excite(int64_t batch, int64_t rows, int64_t channels) {
    constexpr int32_t dtype = sizeof(T) == 4 ? SPOTLIGHTS_FLOAT32 : SPOTLIGHTS_BFLOAT16;
    const Case c{batch, channels, rows, 1, 1, 1, 1, 1};
    const int64_t reduced = channels / 4 + 1;
    const size_t cells = batch * rows * channels;
    const std::vector<double> x = random_numbers<T>(cells, 6), first = random_numbers<T>(channels * reduced, 7);
    const std::vector<double> second = random_numbers<T>(channels * reduced, 8), scale = random_numbers<float>(channels, 9);
    const std::vector<double> shift = random_numbers<float>(channels, 10), bias = random_numbers<float>(channels, 11);
    const std::vector<float> s(scale.begin(), scale.end()), t(shift.begin(), shift.end()), b(bias.begin(), bias.end());
    std::vector<T> w1(first.size()), w2(second.size());
    for (size_t n = 0; n < w1.size(); n++) assign(w1[n], first[n]), assign(w2[n], second[n]);
    bool failed = false;
    for (int affine = 0; affine < 2; affine++) {
        std::vector<double> expected(cells), sum(cells);
        for (int64_t image = 0; image < batch; image++) {
            const size_t begin = image * rows * channels, end = begin + rows * channels;
            std::vector<double> mean(channels), hidden(reduced), gate(channels);
            for (size_t n = begin; n < end; n++) {
                const int64_t k = n % channels;
                expected[n] = affine ? x[n] * scale[k] + shift[k] : x[n];
                sum[n] = expected[n] + x[cells - 1 - n];
                mean[k] += expected[n] / rows;
            }
            for (int64_t r = 0; r < reduced; r++) {
                hidden[r] = bias[r % channels];
                for (int64_t k = 0; k < channels; k++) hidden[r] += first[r * channels + k] * mean[k];
                hidden[r] = std::max(hidden[r], 0.0);
            }
            for (int64_t k = 0; k < channels; k++) {
                double z = bias[k];
                for (int64_t r = 0; r < reduced; r++) z += second[k * reduced + r] * hidden[r];
                gate[k] = 1 / (1 + std::exp(-z));
            }
            for (size_t n = begin; n < end; n++) expected[n] *= gate[n % channels];
        }
        const double largest = largest_of(expected) + 1, rounding = sizeof(T) == 4 ? 0 : 1 / 256.0;
        std::vector<float> b1(reduced);
        for (int64_t r = 0; r < reduced; r++) b1[r] = b[r % channels];
        for (int32_t level = 0; level <= spotlights_best_level(); level++)
            for (int in_place = 0; in_place < 2; in_place++) {
                std::vector<T> in(cells), reverse(cells), out(cells);
                for (size_t n = 0; n < cells; n++) {
                    assign(in[n], x[n]);
                    assign(reverse[cells - 1 - n], x[n]);
                    assign(out[n], NAN);
                }
                const auto run = in_place ? backwards_for : spotlights_serial_for;
                const float *by = affine ? s.data() : nullptr, *on = affine ? t.data() : nullptr;
                T* to = in_place ? reverse.data() : out.data();
                int32_t code = spotlights_scale_add(run, level, dtype, batch, rows, channels, in.data(), by, on,
                                                    reverse.data(), to);
                for (size_t n = 0; n < cells; n++)
                    compare("scaled sum", c, level, code ? NAN : to_double(to[n]), sum[n], 2, rounding, failed);
                to = in_place ? in.data() : out.data();
                code = spotlights_squeeze_excite(run, level, dtype, batch, rows, channels, reduced, in.data(), by, on,
                                                 w1.data(), b1.data(), w2.data(), b.data(), to);
                for (size_t n = 0; n < cells; n++)
                    compare("excitation", c, level, code ? NAN : to_double(to[n]), expected[n], largest, rounding, failed);
            }
    }
    return !failed;
}

int main() {
    const Case cases[] = {
        // One table.
        {2, 32, 14, 21, 7, 7, 7, 7}, {1, 20, 13, 20, 5, 9, 5, 9}, {2, 5, 30, 17, 14, 14, 14, 14},
        {1, 16, 20, 33, 16, 16, 16, 16}, {3, 33, 9, 50, 3, 20, 3, 20}, {5, 16, 20, 13, 14, 14, 14, 14},
        {3, 17, 13, 5, 7, 7, 7, 7}, {1, 24, 24, 23, 8, 8, 8, 8}, {3, 8, 12, 12, 12, 12, 12, 12},
        {1, 1, 1, 1, 7, 7, 7, 7}, {2, 3, 5, 70, 2, 33, 2, 33}, {2, 9, 1, 1, 1, 1, 1, 1}, {1, 80, 8, 9, 4, 4, 4, 4},
        // Windows of matrix units: many and few of them, odd sides, a row's numbers in eight and in four pairs.
        {2, 20, 27, 30, 9, 13, 9, 13}, {2, 16, 30, 31, 14, 11, 14, 11}, {1, 17, 11, 24, 11, 8, 11, 8},
        {1, 3, 14, 14, 14, 14, 14, 14}, {1, 33, 70, 70, 8, 15, 8, 15},
        // Two tables: windows cut within a sub-window and between two, sub-windows of a row, of a cell, of many tiles.
        {2, 20, 28, 28, 14, 14, 7, 7}, {1, 33, 17, 26, 8, 12, 4, 3}, {2, 5, 10, 37, 4, 32, 2, 16},
        {1, 16, 9, 13, 9, 20, 1, 1}, {1, 8, 6, 41, 2, 40, 2, 20}, {1, 3, 21, 9, 14, 14, 7, 7}};
    bool right = true;
    for (const Case& c : cases) right = Problem<float>(c).check() && Problem<bfloat16>(c).check() && right;
    // More rows than one chunk, fewer channels than one vector, more images than threads.
    const int64_t maps[][3] = {{2, 35, 1},   {3, 16, 3},   {2, 90, 17}, {1, 1, 20},
                               {1, 420, 64}, {300, 6, 40}, {1, 6, 9000}};
    for (const auto& [batch, rows, channels] : maps) {
        right = response<float>(batch, rows, channels) && response<bfloat16>(batch, rows, channels) && right;
        right = response_gradient<float>(batch, rows, channels) && right;
        right = response_gradient<bfloat16>(batch, rows, channels) && right;
        if (channels <= 64) right = excite<float>(batch, rows, channels) && excite<bfloat16>(batch, rows, channels) && right;
    }
    right &= spotlights_multiply_adds(backwards_for, 0, 2, 10) % (2 * 10 * 12) == 0;
    std::printf("levels %d, worst relative error %.2e\n", spotlights_best_level() + 1, worst);
    return right ? 0 : 1;
}
