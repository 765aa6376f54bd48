#if defined(__linux__)
#include <unistd.h>
#endif

#include <chrono>

#include "common.h"

namespace {

template <int N>
struct Constant {
    static constexpr int value = N;
};

// A multiply-add takes as long as eight others, so at least so many sums are computed together, of a tile's columns and
// of several windows. The table's entries and the inputs that they need meanwhile have to fit into registers, too.
constexpr int64_t kMostAtOnce = 4;
constexpr int64_t wide_columns(int64_t registers, int64_t tile) {
    return registers >= 32 || tile <= 5 ? tile : (tile + 1) / 2;
}
constexpr int64_t windows_at_once(int64_t registers, int64_t columns) {
    const int64_t fit = (registers >= 32 ? 16 : 10) / columns;
    return fit < 1 ? 1 : fit > kMostAtOnce ? kMostAtOnce : fit;
}
// The fewest windows of which both parts of a tile's columns come out even.
constexpr int64_t windows_together(int64_t registers, int64_t tile) {
    const int64_t columns = wide_columns(registers, tile), wide = windows_at_once(registers, columns);
    const int64_t rest = columns < tile ? windows_at_once(registers, tile - columns) : 1;
    return wide % rest == 0 ? wide : wide * rest;
}

// A row of `width` in the fewest equal tiles of at most `most`.
inline int64_t tile_of(int64_t width, int64_t most) { return parts(width, parts(width, most)); }

// Windows of two times so many rows and columns are computed by their halves.
constexpr int64_t kLeastHalf = 5, kMostHalf = 8;

constexpr int64_t kMostGroup = 64;  // windows in one item of work

// Sub-windows are cut into whole tiles.
inline int64_t divisor_of(int64_t width, int64_t most) {
    int64_t tile = least(width, most);
    while (width % tile) tile--;
    return tile;
}

struct Strides {
    int64_t x_channel, x_row, x_column, y_channel, y_row, y_column;
    Strides of_outputs() const { return {y_channel, y_row, y_column, y_channel, y_row, y_column}; }
};

// The windows of one kind: their part inside the map, and the sub-windows of the second table (or the whole window).
// The packed table starts with the entries for pairs of positions in one sub-window; those for other pairs follow.
struct Geometry {
    int64_t rows, width;
    int64_t lh, lw;
    int64_t tiles;         // of a row
    int64_t pitch;         // tiles from row to row of a packed window
    int64_t packed_tiles;  // of a packed window
    int64_t half;          // rows of half a window, or 0: computed directly
    int64_t steps;         // pairs of a row of inputs and a row of a tile of outputs
    int64_t near_pitch, near_centre, far_pitch, far_centre;
};

// Windows of one kind lie on a grid: `down` by `across` of them in every image from (top, left) on.
struct Part {
    int64_t top, left, down, across, windows, groups, tile;
    Geometry geometry;
};

// Windows of one kind and blocks of channels that are computed together.
struct Item {
    const Part* part;
    int64_t block, blocks, count;
    int64_t x_at[kMostGroup], y_at[kMostGroup];  // where the windows start in the maps
};

struct Job {
    spotlights_wbmm_shape shape;
    const void* x;
    void* y;
    int64_t x_batch, y_batch;
    Strides strides;
    Part parts[4];     // whole windows, cut at the right, at the bottom, at both
    int64_t group;     // windows in one item, or packed at once for a gradient's sums
    int64_t blocks;    // blocks of channels in one item
    int64_t scratch;   // vectors of one packed window
    int64_t table_size;  // vectors of one block of channels
    const float *packed, *bias;
    int64_t chunks, sum_columns;
    float *sums, *gradient;
    bool halves;
    int32_t no_memory;
    bool large;  // more than the second-level caches hold
    bool past;   // outputs are written past the caches

    void item(int64_t index, int64_t all_blocks, Item& item) const {
        const int64_t pieces = ::parts(all_blocks, blocks);
        const Part* p = parts;
        while (index >= p->groups * pieces) index -= p++->groups * pieces;
        set_blocks(index % pieces, all_blocks, item);
        set_windows(*p, index / pieces * group, p->windows, item);
    }

    // A group of a chunk's windows, of which each chunk has its share of every kind; after the last, a count of 0.
    void chunk_item(int64_t chunk, int64_t index, int64_t piece, int64_t all_blocks, Item& item) const {
        set_blocks(piece, all_blocks, item);
        item.count = 0;
        for (const Part& p : parts) {
            const int64_t first = p.windows * chunk / chunks, last = p.windows * (chunk + 1) / chunks;
            const int64_t groups = ::parts(last - first, group);
            if (index < groups) return set_windows(p, first + index * group, last, item);
            index -= groups;
        }
    }

    void set_blocks(int64_t piece, int64_t all_blocks, Item& item) const {
        item.block = piece * blocks;
        item.blocks = least(blocks, all_blocks - item.block);
    }

    void set_windows(const Part& p, int64_t first, int64_t last, Item& item) const {
        item.part = &p;
        item.count = least(group, last - first);
        offsets(p, first, item.count, item.x_at, item.y_at);
    }

    // Where `count` windows start in the two maps, from the one numbered `first` on.
    void offsets(const Part& p, int64_t first, int64_t count, int64_t* x_at, int64_t* y_at) const {
        int64_t j = first % p.across, i = first / p.across % p.down, b = first / p.across / p.down;
        for (int64_t n = 0; n < count; n++) {
            const int64_t row = p.top + i * shape.wh, column = p.left + j * shape.ww;
            x_at[n] = b * x_batch + row * strides.x_row + column * strides.x_column;
            y_at[n] = b * y_batch + row * strides.y_row + column * strides.y_column;
            if (++j < p.across) continue;
            j = 0;
            if (++i < p.down) continue;
            i = 0;
            b++;
        }
    }
};

// Fetches the next item's maps bit by bit while this one is computed, so that memory does not wait for arithmetic.
struct Ahead {
    const Item& next;
    const Strides& s;
    const char *x = nullptr, *y = nullptr, *from = nullptr, *to = nullptr;
    int64_t size, bytes = 0, lines = 0, at = 0, n = 0, i = 0, j = 0;
    const bool past;

    // `steps`: how often `step` will be called. Few lines at a time, or arithmetic waits for their buffers.
    Ahead(const Job& job, const Item& next, int64_t lanes, int64_t size, int64_t steps)
        : next(next), s(job.strides), size(size), past(job.past) {
        const bool rows = job.strides.x_channel == 1 && job.strides.y_channel == 1;
        if (!job.large || !rows || !next.count) return;
        const int64_t start = next.block * lanes, channels = least(next.blocks * lanes, job.shape.channels - start);
        const Geometry& g = next.part->geometry;
        x = (const char*)job.x + start * size;
        y = (const char*)job.y + start * size;
        bytes = channels * size;
        lines = parts(next.count * g.rows * g.width * parts(bytes, 64), steps);
        find_pixel();
    }

    INLINE_MEMBER void step() {
        for (int64_t k = 0; k < lines; k++) {
            __builtin_prefetch(from + at, 0, 2);
            if (!past) __builtin_prefetch(to + at, 1, 2);
            at += 64;
            if (at >= bytes) next_pixel();
        }
    }

   private:
    void find_pixel() {
        from = x + (next.x_at[n] + i * s.x_row + j * s.x_column) * size;
        to = y + (next.y_at[n] + i * s.y_row + j * s.y_column) * size;
    }

    __attribute__((noinline)) void next_pixel() {
        at = 0;
        if (++j == next.part->geometry.width) j = 0, i++;
        if (i == next.part->geometry.rows) i = 0, n++;
        if (n < next.count)
            find_pixel();
        else
            lines = 0;
    }
};

struct Table {
    int64_t near_rows, near_pitch, far_rows, far_pitch;
    int64_t near_size() const { return near_rows * near_pitch; }
    int64_t size() const { return near_size() + far_rows * far_pitch; }
};

// What `spotlights_wbmm_pack` was asked for.
struct Pack {
    spotlights_wbmm_shape shape;
    Table layout;
    const float *table, *local;
    float* packed;
    bool turned, shortcut, halves;
    void (*pair_rows)(float*, int64_t, int64_t);  // what the table needs for bfloat16 maps, or null
    int32_t no_memory;
};

// Vectors of the nine tables of a block.
int64_t halves_size(const spotlights_wbmm_shape& s) { return 9 * (s.wh - 1) * (s.ww - 1); }

// How matrix units compute windows of at most kTileSide by kTileSide: see wbmm_tiles.inc.
constexpr int64_t kTileSide = 16;  // rows of a tile, and numbers of 32 bits in a row

struct Tiling {
    int64_t wh, ww;
    int64_t pairs = ww > kTileSide / 2 ? 8 : 4;                // of numbers, in a packed row
    int64_t together = kTileSide / pairs;                      // rows of a window in one row of a tile
    int64_t offsets = parts(2 * wh - 1, together) * together;  // and rows from window to window
    int64_t lead = parts(wh - 1, together) * together;         // rows of zeros before the first window
    int64_t out_row = (kTileSide + 1) * kTileSide;             // or rows would share few sets of the cache
    explicit Tiling(const spotlights_wbmm_shape& s) : wh(s.wh), ww(s.ww) {}
    int64_t channel(int64_t windows) const { return (lead + windows * offsets) * pairs; }
    int64_t table() const { return offsets * 2 * kTileSide; }  // numbers of 32 bits for one channel
};

// Not the count of one item, which depends on the threads: the two ways add up in different orders.
constexpr int64_t kFewWindows = 4;
int64_t windows_of(const spotlights_wbmm_shape& s) { return s.batch * parts(s.height, s.wh) * parts(s.width, s.ww); }
bool few_windows(const spotlights_wbmm_shape& s) { return windows_of(s) < kFewWindows; }

}  // namespace

#define BODY "wbmm_body.inc"
#include "levels.inc"
#undef BODY

#if SPOTLIGHTS_DISPATCH
#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,prfchw,prefer-vector-width=512")
#define LANES 16
#include "wbmm_dot.inc"
#undef LANES
#pragma GCC pop_options

#if defined(__linux__) && __GNUC__ >= 11
#include <sys/syscall.h>
#define SPOTLIGHTS_TILES 1
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512vl,avx512dq,avx512bw,avx2,fma,prfchw,prefer-vector-width=512")
#define LANES 16
#include "wbmm_tiles.inc"
#undef LANES
#pragma GCC pop_options
#endif
#endif

namespace {

struct Kernels {
    int64_t lanes, most_tile, registers;
    void (*pack_blocks)(int64_t, int64_t, void*);
    void (*forward[2])(int64_t, int64_t, void*);
    void (*forward_halves[2])(int64_t, int64_t, void*);
    void (*weight_gradient[2])(int64_t, int64_t, void*);
    void (*add_chunks)(int64_t, int64_t, void*);
    void (*multiply_adds)(int64_t, int64_t, void*);
    void (*pair_rows)(float*, int64_t, int64_t);  // what the table needs for bfloat16 maps, or null
    void (*forward_tiles)(int64_t, int64_t, void*);  // matrix units for bfloat16 maps, or null
    void (*pack_tiles)(int64_t, int64_t, void*);
};

#define KERNELS(level)                                                                                               \
    Kernels {                                                                                                        \
        sizeof(level::vec) / 4, level::kMostTile, level::kRegisters, level::pack_blocks,                             \
            {level::forward<level::Fma, float>, level::forward<level::Fma, bfloat16>},                               \
            {level::forward<level::Halves, float>, level::forward<level::Halves, bfloat16>},                         \
            {level::weight_gradient<float>, level::weight_gradient<bfloat16>}, level::add_chunks,                    \
            level::multiply_adds, nullptr, nullptr, nullptr                                                          \
    }

Kernels kernels_of(int32_t level) {
#if SPOTLIGHTS_DISPATCH
    if (level >= SPOTLIGHTS_AVX512) {
        Kernels k = KERNELS(avx512);
        if (level == SPOTLIGHTS_AVX512_BF16) {
            k.forward[SPOTLIGHTS_BFLOAT16] = avx512::forward<avx512::Dot, bfloat16>;
            k.pair_rows = avx512::pair_rows;
        }
#if SPOTLIGHTS_TILES
        if (level == SPOTLIGHTS_AMX) {
            k.forward_tiles = avx512::forward_tiles;
            k.pack_tiles = avx512::pack_tiles;
        }
#endif
        return k;
    }
    if (level == SPOTLIGHTS_AVX2) return KERNELS(avx2);
#else
    (void)level;
#endif
    return KERNELS(baseline);
}

bool valid(const spotlights_wbmm_shape& s) {
    return s.batch >= 0 && s.channels >= 0 && s.height >= 0 && s.width >= 0 && s.wh > 0 && s.ww > 0 && s.lh > 0 &&
           s.lw > 0 && s.wh % s.lh == 0 && s.ww % s.lw == 0;
}

bool two_tables(const spotlights_wbmm_shape& s) { return s.lh != s.wh || s.lw != s.ww; }

// Positions that a tile has beyond the window reach past the table's edges, so its rows have zeros there.
Table table_of(const spotlights_wbmm_shape& s, int64_t most_tile) {
    const int64_t margin = parts(s.lw, most_tile) - 1;
    Table t{2 * s.lh - 1, 2 * (s.lw + margin) - 1, 0, 0};
    if (two_tables(s)) t.far_rows = 2 * s.wh - 1, t.far_pitch = 2 * (s.ww + margin) - 1;
    return t;
}

int64_t tile_for(const spotlights_wbmm_shape& s, int64_t width, int64_t most_tile) {
    return width > s.lw ? divisor_of(s.lw, most_tile) : tile_of(width, most_tile);
}

// Whether windows are computed by their halves. A second table must act between positions of one half, or not exist.
bool by_halves(const spotlights_wbmm_shape& s) {
    const bool even = s.wh % 2 == 0 && s.ww % 2 == 0 && least(s.wh, s.ww) >= 2 * kLeastHalf;
    return even && s.wh <= 2 * kMostHalf && s.ww <= 2 * kMostHalf &&
           (!two_tables(s) || (2 * s.lh == s.wh && 2 * s.lw == s.ww));
}

// Whether matrix units compute it: below 8 x 8 the vectors were as fast.
bool by_tiles(const spotlights_wbmm_shape& s, int32_t dtype, const Kernels& k) {
    const int64_t least_side = least(s.wh, s.ww), most_side = s.wh + s.ww - least_side;
    return dtype == SPOTLIGHTS_BFLOAT16 && k.forward_tiles && least_side >= kTileSide / 2 && most_side <= kTileSide &&
           !two_tables(s);
}

void divide(Job& job, int64_t most_tile, int64_t most_group, bool halves) {
    const spotlights_wbmm_shape& s = job.shape;
    const Table table = table_of(s, most_tile);
    const int64_t whole_h = s.height / s.wh, whole_w = s.width / s.ww;
    job.group = most_group;
    job.scratch = 0;
    for (int kind = 0; kind < 4; kind++) {
        const bool right = kind & 1, bottom = kind & 2;
        Part& p = job.parts[kind];
        Geometry& g = p.geometry;
        g.rows = bottom ? s.height % s.wh : s.wh;
        g.width = right ? s.width % s.ww : s.ww;
        p.top = bottom ? whole_h * s.wh : 0;
        p.left = right ? whole_w * s.ww : 0;
        p.down = bottom ? g.rows > 0 : whole_h;
        p.across = right ? g.width > 0 : whole_w;
        p.windows = s.batch * p.down * p.across;
        p.groups = parts(p.windows, most_group);
        if (!p.windows) continue;
        p.tile = halves ? s.ww / 2 : tile_for(s, g.width, most_tile);
        g.lh = s.lh;
        g.lw = s.lw;
        g.tiles = parts(g.width, p.tile);
        g.near_pitch = table.near_pitch;
        g.near_centre = (s.lh - 1) * table.near_pitch + table.near_pitch / 2;
        g.far_pitch = table.far_pitch;
        g.far_centre = table.near_size() + (s.wh - 1) * table.far_pitch + table.far_pitch / 2;
        g.pitch = g.tiles;
        g.packed_tiles = g.rows * g.tiles;
        g.half = 0;
        g.steps = g.rows * g.rows * g.tiles;
        if (halves) {
            g.half = s.wh / 2;
            const int64_t upper = least(g.half, g.rows), lower = g.rows - upper;
            g.pitch = g.tiles == 2 ? 3 : 1;
            g.packed_tiles = (g.rows + (lower ? upper : 0)) * g.pitch;
            g.steps = upper * (upper + 2 * lower) * g.pitch;
        }
        const int64_t size = g.packed_tiles * p.tile;
        if (size > job.scratch) job.scratch = size;
    }
}

Job job_of(const spotlights_wbmm_shape& s, const void* x, const int64_t* xs, void* y, const int64_t* ys) {
    Job job{};
    job.shape = s;
    job.x = x;
    job.y = y;
    job.x_batch = xs[0];
    job.y_batch = ys[0];
    job.strides = {xs[1], xs[2], xs[3], ys[1], ys[2], ys[3]};
    return job;
}

constexpr int64_t kGroupPositions = 190;  // of the windows in one item: enough to load a table for, few enough that
constexpr int64_t kLeastBlocks = 4;       // neighbouring blocks of channels find their lines in the second-level cache
constexpr int64_t kMostBlocks = 16;       // longer stretches of memory are fetched faster
constexpr int64_t kGroupHalves = 4;       // windows for one load of the nine tables of sums
constexpr int64_t kChunk = 32;            // windows, at least, for one table of sums
constexpr int64_t kGroupTiles = 8;        // windows on matrix units; more touch more pages than the processor holds
constexpr int64_t kLarge = 1 << 20;       // bytes of maps per thread
constexpr int64_t kPast = 8 << 20;        // outputs that no cache would keep for whoever reads them
constexpr int64_t kGradientTile = 8;       // leaves every accumulator in a register

int64_t second_level_cache() {
#ifdef _SC_LEVEL2_CACHE_SIZE
    static const int64_t bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
    if (bytes > 0) return bytes;
#endif
    return 1 << 20;
}

// Whether every block of channels of every pixel is a line of memory.
bool fills_lines(const spotlights_wbmm_shape& s, const void* map, const int64_t* stride) {
    return s.channels % 16 == 0 && stride[1] == 1 && (stride[0] | stride[2] | stride[3]) % 16 == 0 &&
           (uintptr_t)map % 64 == 0;
}

// The maps of two items, in and out, keep to three eighths of the second-level cache, the blocks' tables to half of that.
int64_t blocks_for(int64_t table, int64_t lanes) {
    const int64_t unit = lanes * sizeof(float), share = second_level_cache() * 3 / 8;
    const int64_t fit = least(share / (4 * kGroupPositions * unit), share / 2 / (table * unit));
    return fit < kLeastBlocks ? kLeastBlocks : least(fit, kMostBlocks);
}

#if SPOTLIGHTS_DISPATCH
// Linux saves the matrix units' registers for processes that have asked.
bool tiles_allowed() {
#if SPOTLIGHTS_TILES
    const long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
           syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}
#endif

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
        return !__builtin_cpu_supports("avx512bf16") ? SPOTLIGHTS_AVX512
               : tiles_allowed()                     ? SPOTLIGHTS_AMX
                                                     : SPOTLIGHTS_AVX512_BF16;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return SPOTLIGHTS_AVX2;
#endif
    return SPOTLIGHTS_BASELINE;
}

int32_t spotlights_dots_pay(void) {
#if SPOTLIGHTS_DISPATCH
    if (spotlights_best_level() < SPOTLIGHTS_AVX512_BF16) return 0;
    void (*const loops[2])(int64_t, int64_t, void*) = {avx512::multiply_adds, avx512::dots};
    double best[2] = {1e9, 1e9};
    for (int round = 0; round < 10; round++)
        for (int k = 0; k < 2; k++) {
            int64_t iterations = 2000;
            const auto start = std::chrono::steady_clock::now();
            loops[k](0, 1, &iterations);
            const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
            if (taken.count() < best[k]) best[k] = taken.count();
        }
    return best[1] < 1.6 * best[0];  // one instruction does the work of two; packing pairs costs a little
#else
    return 0;
#endif
}

int64_t spotlights_wbmm_packed_size(int32_t level, const spotlights_wbmm_shape* shape) {
    const Kernels k = kernels_of(level);
    const int64_t direct = table_of(*shape, k.most_tile).size(), halves = by_halves(*shape) ? halves_size(*shape) : 0;
    int64_t most = halves > direct ? halves : direct;
    if (by_tiles(*shape, SPOTLIGHTS_BFLOAT16, k) && Tiling(*shape).table() > most) most = Tiling(*shape).table();
    return parts(shape->channels, k.lanes) * k.lanes * most;
}

int32_t spotlights_wbmm_pack(spotlights_parallel_for run, int32_t level, const spotlights_wbmm_shape* shape,
                             int32_t dtype, const float* table, const float* local, int32_t turned, int32_t shortcut, float* packed) {
    if (!valid(*shape) || !known(dtype)) return SPOTLIGHTS_BAD_ARGUMENT;
    const Kernels k = kernels_of(level);
    void (*const pair_rows)(float*, int64_t, int64_t) = dtype == SPOTLIGHTS_BFLOAT16 ? k.pair_rows : nullptr;
    Pack p{*shape, table_of(*shape, k.most_tile), table, local, packed, turned != 0, shortcut != 0,
           !pair_rows && by_halves(*shape), pair_rows, 0};
    const auto pack = by_tiles(*shape, dtype, k) ? k.pack_tiles : k.pack_blocks;
    const int32_t code = run(0, parts(shape->channels, k.lanes), 1, pack, &p);
    return p.no_memory ? SPOTLIGHTS_NO_MEMORY : finish(code);
}

int32_t spotlights_wbmm_forward(spotlights_parallel_for run, int32_t level, const spotlights_wbmm_shape* shape,
                                int32_t dtype, const void* input, const int64_t* input_stride, const float* packed,
                                const float* bias, void* output, const int64_t* output_stride, int32_t threads) {
    const spotlights_wbmm_shape& s = *shape;
    if (!valid(s) || !known(dtype)) return SPOTLIGHTS_BAD_ARGUMENT;
    if (s.batch * s.channels * s.height * s.width == 0) return SPOTLIGHTS_OK;
    const Kernels k = kernels_of(level);
    Job job = job_of(s, input, input_stride, output, output_stride);
    const bool tiles = by_tiles(s, dtype, k), pairs = dtype == SPOTLIGHTS_BFLOAT16 && k.pair_rows;
    const bool halves = by_halves(s) && !tiles && !pairs;
    const int64_t at_once = windows_together(k.registers, halves ? s.ww / 2 : tile_for(s, s.ww, k.most_tile));
    const int64_t blocks = parts(s.channels, k.lanes), windows = windows_of(s);
    int64_t group = parts(parts(kGroupPositions, s.wh * s.ww), at_once) * at_once;
    // Work for all threads comes first.
    if (tiles) {
        group = least(windows, kGroupTiles);
        if (parts(windows, group) * blocks < 2 * threads) group = few_windows(s) ? 1 : kFewWindows;
    } else {
        if (windows * blocks < 4 * threads * group) group = at_once;
        if (windows * blocks < 4 * threads * group) group = 1;
    }
    divide(job, k.most_tile, least(kMostGroup, group), halves);
    job.packed = packed;
    job.bias = bias;
    job.table_size = halves ? halves_size(s) : table_of(s, k.most_tile).size();
    job.large = s.batch * s.channels * s.height * s.width * (dtype == SPOTLIGHTS_FLOAT32 ? 8 : 4) > kLarge * threads;
    job.past = k.lanes == 16 && dtype == SPOTLIGHTS_FLOAT32 && fills_lines(s, output, output_stride) &&
               s.batch * s.channels * s.height * s.width > kPast;
    int64_t groups = 0;
    for (const Part& p : job.parts) groups += p.groups;
    // Neighbouring channels share an item as long as that leaves work for all threads.
    job.blocks = least(tiles ? kLeastBlocks : blocks_for(job.table_size, k.lanes), blocks);
    while (job.blocks > 1 && groups * parts(blocks, job.blocks) < 4 * threads) job.blocks = parts(job.blocks, 2);
    job.blocks = parts(blocks, parts(blocks, job.blocks));
    const auto body = tiles ? k.forward_tiles : halves ? k.forward_halves[dtype] : k.forward[dtype];
    const int32_t code = run(0, groups * parts(blocks, job.blocks), 1, body, &job);
    return job.no_memory ? SPOTLIGHTS_NO_MEMORY : finish(code);
}

int32_t spotlights_wbmm_weight_gradient(spotlights_parallel_for run, int32_t level, const spotlights_wbmm_shape* shape,
                                        int32_t dtype, const void* grad_output, const int64_t* grad_stride,
                                        const void* input, const int64_t* input_stride, float* gradient) {
    const spotlights_wbmm_shape& s = *shape;
    if (!valid(s) || two_tables(s) || s.batch * s.channels * s.height * s.width == 0 || !known(dtype))
        return SPOTLIGHTS_BAD_ARGUMENT;
    const Kernels k = kernels_of(level);
    Job job = job_of(s, input, input_stride, const_cast<void*>(grad_output), grad_stride);
    job.halves = by_halves(s);
    divide(job, kGradientTile, 1, job.halves);
    job.group = job.halves ? kGroupHalves : least(kMostGroup, parts(kGroupPositions, s.wh * s.ww));
    job.gradient = gradient;
    // Half the columns are a whole row of tiles, so that every tile's offsets lie inside.
    job.sum_columns = 2 * parts(s.ww, kGradientTile) * kGradientTile - 1;
    job.table_size = job.halves ? halves_size(s) : (2 * s.wh - 1) * job.sum_columns;
    job.large = s.batch * s.channels * s.height * s.width * (dtype == SPOTLIGHTS_FLOAT32 ? 8 : 4) > kLarge;
    const int64_t blocks = parts(s.channels, k.lanes);
    const int64_t windows = windows_of(s);
    // Items for many threads, from the shape alone: results do not depend on the number of threads. Chunks are large, as
    // each fills and adds sums of its own.
    job.blocks = least(kLeastBlocks, blocks);
    job.chunks = least(parts(64, parts(blocks, job.blocks)), parts(windows, kChunk));
    while (job.blocks > 1 && job.chunks * parts(blocks, job.blocks) < 16) job.blocks = parts(job.blocks, 2);
    job.sums = allocate(job.chunks * blocks * job.table_size * k.lanes);
    if (!job.sums) return SPOTLIGHTS_NO_MEMORY;
    int32_t code = run(0, job.chunks * parts(blocks, job.blocks), 1, k.weight_gradient[dtype], &job);
    if (code == 0 && !job.no_memory) code = run(0, blocks, 1, k.add_chunks, &job);
    free(job.sums);
    return job.no_memory ? SPOTLIGHTS_NO_MEMORY : finish(code);
}

int64_t spotlights_multiply_adds(spotlights_parallel_for run, int32_t level, int64_t tasks, int64_t iterations) {
    const Kernels k = kernels_of(level);
    run(0, tasks, 1, k.multiply_adds, &iterations);
    return tasks * iterations * 12 * k.lanes;
}
