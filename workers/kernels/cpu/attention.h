// Attention over page tables, in place, for every KV group: grouped heads, windows, sinks, softcap, latents.
//
// A task is some queries of a sequence and one KV head. It goes over the keys in blocks of 64 that begin at multiples
// of 64, with a running maximum and sum (FlashAttention, arXiv:2205.14135): a query's result does not depend on the
// queries beside it, on chunks, or on the size of pages.
#pragma once

#include <cmath>

#include "products.h"

namespace holdfast {

constexpr int KEYS = 64, KEY_PANELS = KEYS / PANEL, ASKED_ROWS = 8;
enum : int32_t { FLOAT8 = 3 };  // E4M3, of KV alone

// What a step computes: sequence after sequence.
struct Batch {
    int64_t num_tokens, num_samples, num_sequences;
    const int32_t *tokens, *rows, *starts, *counts, *logit_rows;
    // Derived: by token, its position; by sequence, its first token.
    const int32_t *positions, *firsts;
};

struct PageTable {
    const int32_t* entries;
    int64_t stride, page_size;

    int64_t page(int64_t row, int64_t position) const { return entries[row * stride + position / page_size]; }
};

struct Pages {
    char* data;
    int64_t page_stride, head_stride;  // elements
    int32_t kind;

    int64_t size() const { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }
    char* at(int64_t page, int64_t head, int64_t offset, int64_t dim) const {
        return data + (page * page_stride + head * head_stride + offset * dim) * size();
    }
};

struct Attention {
    PageTable table;
    Pages k, v;  // latents: v is the first `v_dim` of k
    int64_t heads, kv_heads, k_dim, v_dim, window;
    float scale, softcap, v_scale;

    int64_t group() const { return heads / kv_heads; }
};

inline const uint16_t* fp8_values() {
    static const auto table = [] {
        std::vector<uint16_t> values(256);
        for (int code = 0; code < 256; code++) {
            int exponent = code >> 3 & 15, fraction = code & 7;
            float value = exponent ? std::ldexp(1.0f + fraction / 8.0f, exponent - 7) : std::ldexp(fraction, -9);
            if ((code & 0x7F) == 0x7F) value = NAN;
            values[code] = uint16_t(as<uint32_t>(code & 0x80 ? -value : value) >> 16);
        }
        return values;
    }();
    return table.data();
}

// To the nearest E4M3, ties to even; what is too large becomes the largest, 448.
inline uint8_t to_fp8(float value) {
    uint32_t sign = as<uint32_t>(value) >> 24 & 0x80;
    float size = std::fabs(value);
    if (std::isnan(value)) return uint8_t(sign | 0x7F);
    if (size >= 448.0f) return uint8_t(sign | 0x7E);
    int exponent = size < 0.015625f ? -6 : std::ilogb(size);
    int eighths = int(std::nearbyint(std::ldexp(size, 3 - exponent)));  // may round up to the next power of two
    if (exponent == -6) return uint8_t(sign | eighths);
    return uint8_t(sign | (((exponent + 7) << 3) + eighths - 8));
}

// One block of keys or values, as rows of the KV's precision (fp8 as bf16), padded to whole vectors of words.
struct KeyRows {
    const char* rows[KEYS];
    bool in_place;

    // `[first, end)`: what may be read; the rest is zero. `copies`: room for the rows, and one more, if they are copied.
    void find(
        const Pages& pages, const PageTable& table, int64_t row, int64_t head, int64_t base, int64_t first, int64_t end,
        int64_t dim, char* copies) {
        constexpr int64_t VECTOR = sizeof(Floats);
        const int64_t size = dim * pages.size(), bytes = row_bytes(pages, dim);
        in_place = pages.kind != FLOAT8 && size % VECTOR == 0;
        const int64_t from = std::max(base, first) - base, to = std::min(base + KEYS, end) - base;
        memset(copies + KEYS * bytes, 0, bytes);
        for (int64_t j = 0; j < from; j++) rows[j] = copies + KEYS * bytes;
        for (int64_t j = std::max(from, to); j < KEYS; j++) rows[j] = copies + KEYS * bytes;
        const int32_t* entry = table.entries + row * table.stride + (base + from) / table.page_size;
        for (int64_t j = from, offset = (base + from) % table.page_size; j < to; entry++, offset = 0) {
            const char* at = pages.at(*entry, head, offset, dim);
            for (const int64_t next = std::min(to, j + table.page_size - offset); j < next; j++, at += size) {
                rows[j] = at;
                if (!in_place) copy(pages, at, dim, bytes, copies + j * bytes, rows[j]);
            }
        }
    }

    static int64_t row_bytes(const Pages& pages, int64_t dim) {
        constexpr int64_t VECTOR = sizeof(Floats);
        return (dim * (pages.kind == FLOAT32 ? 4 : 2) + VECTOR - 1) / VECTOR * VECTOR;
    }

    static void copy(const Pages& pages, const char* from, int64_t dim, int64_t bytes, char* to, const char*& row) {
        row = to;
        memset(to + bytes - sizeof(Floats), 0, sizeof(Floats));
        if (pages.kind != FLOAT8) {
            memcpy(to, from, dim * pages.size());
            return;
        }
        auto* values = reinterpret_cast<uint16_t*>(to);
        for (int64_t d = 0; d < dim; d++) values[d] = fp8_values()[uint8_t(from[d])];
    }
};

// Asks for the next block, whose place no hardware guesses. No more than some rows can be on their way at once.
struct Ahead {
    const KeyRows *keys, *values;  // null: none
    int64_t key_bytes, value_bytes;
    int asked = 0;
    void ask(int num) {
        if (!keys) return;
        for (num = std::min(asked + num, KEYS); asked < num; asked++) {
            for (int64_t i = 0; i < key_bytes; i += 64) __builtin_prefetch(keys->rows[asked] + i);
            for (int64_t i = 0; values && i < value_bytes; i += 64) __builtin_prefetch(values->rows[asked] + i);
        }
    }
};

// Keys as panels of their words: `[words][PANEL]`, one panel after another, `panel_words` apart.
inline void pack_keys(const KeyRows& keys, Ahead& ahead, int64_t words, int64_t panel_words, uint32_t* to) {
    for (int j = 0; j < KEYS; j += LANES) {
        uint32_t* panel = to + j / PANEL * panel_words + j % PANEL;
        for (int64_t word = 0; word < words; word += LANES) {
            ahead.ask(1);
            transpose(keys.rows + j, 4 * word, panel + word * PANEL, PANEL);
        }
    }
}

// Values of bf16 in pairs of keys: `[KEYS / 2][width]` words.
inline void pack_values(const KeyRows& values, Ahead& ahead, int64_t dim, int64_t width, uint32_t* to) {
    for (int j = 0; j < KEYS; j += 2, to += width) {
        ahead.ask(1);
        for (int64_t column = 0; column < dim; column += LANES) {
            Words low = widened(read<Halves>(values.rows[j] + 2 * column));
            Words both = low | widened(read<Halves>(values.rows[j + 1] + 2 * column)) << 16;
            memcpy(to + column, &both, sizeof both);
        }
    }
}

// A block's values for a product with its weights: what a word of a weight is multiplied with, LANES columns from
// `column` on.
template <class T>
struct InPlace {
    static constexpr int STEPS = KEYS;
    const KeyRows& values;

    Floats at(int k, int64_t column) const { return load(reinterpret_cast<const T*>(values.rows[k]) + column); }
    static Floats add(Floats sum, uint32_t weight, Floats value) { return sum + as<float>(weight) * value; }
};
#if defined(__AVX512BF16__)
struct InPairs {
    static constexpr int STEPS = KEYS / 2;
    const uint32_t* words;
    int64_t width;

    __m512bh at(int k, int64_t column) const { return read<__m512bh>(words + k * width + column); }
    static Floats add(Floats sum, uint32_t weight, __m512bh value) {
        return Floats(_mm512_dpbf16_ps(__m512(sum), as<__m512bh>(_mm512_set1_epi32(int(weight))), value));
    }
};
#endif

// Adds to M rows of `sums`, `width` apart, V vectors from `column` on of the product of `weights [M][STEPS]` and values.
template <int M, int V, class Values>
[[gnu::noinline]] void add_values(float* sums, int64_t width, const uint32_t* weights, const Values& values, int64_t column) {
    Floats acc[M][V];
    auto sums_of = [&](int m, int v) { return sums + m * width + column + v * LANES; };
    unrolled<M>([&](auto m) INLINED { unrolled<V>([&](auto v) INLINED { acc[m][v] = load(sums_of(m, v)); }); });
    for (int k = 0; k < Values::STEPS; k++) {
        decltype(values.at(0, 0)) columns[V];
        unrolled<V>([&](auto v) INLINED { columns[v] = values.at(k, column + v * LANES); });
        unrolled<M>([&](auto m) INLINED {
            const uint32_t weight = weights[m * Values::STEPS + k];
            unrolled<V>([&](auto v) INLINED { acc[m][v] = Values::add(acc[m][v], weight, columns[v]); });
        });
    }
    unrolled<M>([&](auto m) INLINED { unrolled<V>([&](auto v) INLINED { store(sums_of(m, v), acc[m][v]); }); });
}

template <class Values, int M = TILE_ROWS>
inline void add_weighted(
    int count, float* sums, int64_t width, const uint32_t* weights, const Values& values, int64_t dim) {
    if constexpr (M > 1) {
        if (count < M) return add_weighted<Values, M - 1>(count, sums, width, weights, values, dim);
    }
    int64_t column = 0;
    if constexpr (M <= PAIRED_ROWS || tile_vectors(M) == 4)
        for (; dim - column > 3 * LANES; column += 4 * LANES) add_values<M, 4>(sums, width, weights, values, column);
    for (; dim - column > LANES; column += 2 * LANES) add_values<M, 2>(sums, width, weights, values, column);
    if (column < dim) add_values<M, 1>(sums, width, weights, values, column);
}

// Scratch of one task, for `rows` queries.
struct AttentionSpace {
    struct Tag;
    uint32_t *queries, *keys, *values, *weights;
    float *scores, *sums, *maxima, *totals;

    AttentionSpace(int64_t rows, int64_t k_words, int64_t v_width, int64_t key_words) {
        int64_t padded = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        int64_t sizes[] = {padded * k_words * 2, KEY_PANELS * key_words, v_width * KEYS / 2, TILE_ROWS * KEYS,
                           TILE_ROWS * KEYS,     padded * v_width,       padded,             padded};
        int64_t total = 0;
        for (auto& size : sizes) total += size = (size + 15) / 16 * 16;
        uint32_t* at = scratch<Tag, uint32_t>(total);
        uint32_t* parts[8];
        for (int i = 0; i < 8; i++) parts[i] = at, at += sizes[i];
        queries = parts[0], keys = parts[1], values = parts[2], weights = parts[3];
        scores = reinterpret_cast<float*>(parts[4]), sums = reinterpret_cast<float*>(parts[5]);
        maxima = reinterpret_cast<float*>(parts[6]), totals = reinterpret_cast<float*>(parts[7]);
    }
};

// One row's scores of a block, one vector after another in each panel, as weights, and by what its sums so far shrink.
inline float soften(
    const Attention& a, const float* scores, Floats weights[KEYS / LANES], int64_t base, int64_t first, int64_t last,
    float& maximum, float& total) {
    constexpr int VECTORS = PANEL / LANES;
    Floats highs = all(-INFINITY);
    for (int v = 0; v < KEYS / LANES; v++) {
        weights[v] = load(scores + v / VECTORS * TILE_ROWS * PANEL + v % VECTORS * LANES) * a.scale;
        if (a.softcap > 0) weights[v] = a.softcap * tanh(weights[v] / a.softcap);
    }
    if (base < first || base + KEYS - 1 > last) {
        Ints lane;
        for (int i = 0; i < LANES; i++) lane[i] = i;
        for (int v = 0; v < KEYS / LANES; v++) {
            Ints at = lane + int32_t(base + v * LANES);
            weights[v] = (at >= int32_t(first)) & (at <= int32_t(last)) ? weights[v] : all(-INFINITY);
        }
    }
    for (int v = 0; v < KEYS / LANES; v++) highs = larger(highs, weights[v]);
    const float highest = std::max(maximum, largest(highs));
    if (highest == -INFINITY) {
        for (int v = 0; v < KEYS / LANES; v++) weights[v] = Floats{};
        return 1.0f;
    }
    Floats added{};
    for (int v = 0; v < KEYS / LANES; v++) {
        weights[v] = exp(weights[v] - highest);
        added += weights[v];
    }
    float kept = 1.0f;
    if (highest != maximum) kept = exp(all(maximum - highest))[0];
    total = total * kept + sum(added);
    maximum = highest;
    return kept;
}

// Weights `[KEYS]` as words: rounded to T, and then in fp32, or in pairs.
template <class T>
inline void store_weights(uint32_t* to, const Floats weights[KEYS / LANES], bool dots) {
    for (int v = 0; v < KEYS / LANES; v++) {
        if (std::is_same_v<T, float>) {
            store(reinterpret_cast<float*>(to) + v * LANES, weights[v]);
        } else if (dots) {
            store(reinterpret_cast<T*>(to) + v * LANES, weights[v]);
        } else {
            T lanes[LANES];
            store(lanes, weights[v]);
            store(reinterpret_cast<float*>(to) + v * LANES, load(lanes));
        }
    }
}

// Queries `[query, query + count)` of a sequence, and KV head `head`.
template <class T>
inline void attend_tile(
    const Attention& a, const Batch& batch, int64_t sequence, int64_t query, int64_t count, int64_t head, const T* q,
    int64_t q_stride, const T* sinks, T* out, int64_t out_stride) {
    const int64_t group = a.group(), rows = count * group, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const bool wide = a.k.kind == FLOAT32;
    const int32_t kind = wide ? FLOAT32 : BFLOAT16;
    const bool dots = by_dots<T>(kind);
    const int64_t k_words = packed_words(dots, a.k_dim);
    const int64_t key_words = (a.k_dim / (wide ? 1 : 2) + LANES - 1) / LANES * LANES;
    const int64_t v_width = (a.v_dim + LANES - 1) / LANES * LANES;
    AttentionSpace space(rows, k_words, v_width, key_words * PANEL);

    const int64_t token = batch.firsts[sequence] + query, start = batch.starts[sequence] + query;
    const int64_t end = start + count, table_row = batch.rows[sequence];
    const int64_t first = a.window ? std::max<int64_t>(0, start - a.window + 1) : 0;
    auto rows_of = [&](int64_t tile) { return int(std::min<int64_t>(TILE_ROWS, rows - tile * TILE_ROWS)); };
    for (int64_t tile = 0; tile < tiles; tile++) {
        const T* pointers[TILE_ROWS];
        for (int i = 0; i < rows_of(tile); i++) {
            int64_t row = tile * TILE_ROWS + i;
            pointers[i] = q + (token + row / group) * q_stride + (head * group + row % group) * a.k_dim;
        }
        pack_rows(pointers, rows_of(tile), a.k_dim, dots, space.queries + tile * TILE_ROWS * k_words);
    }
    for (int64_t row = 0; row < rows; row++) {
        space.maxima[row] = sinks ? to_float(sinks[head * group + row % group]) : -INFINITY;
        space.totals[row] = sinks ? 1.0f : 0.0f;
    }
    memset(space.sums, 0, sizeof(float) * rows * v_width);

    struct Copies;
    const Pages& v = a.v.data ? a.v : a.k;
    const int64_t k_bytes = (KEYS + 1) * KeyRows::row_bytes(a.k, a.k_dim), v_bytes = (KEYS + 1) * KeyRows::row_bytes(v, a.v_dim);
    char* copies = scratch<Copies, char>(k_bytes + v_bytes);
    KeyRows of_keys[2], of_values[2];  // of this block and the next, in turn, if it was found with this one
    bool found = false;
    auto find = [&](int64_t base) {
        const int at = base / KEYS % 2;
        of_keys[at].find(a.k, a.table, table_row, head, base, first, end, a.k_dim, copies);
        if (a.v.data) of_values[at].find(a.v, a.table, table_row, head, base, first, end, a.v_dim, copies + k_bytes);
    };
    for (int64_t base = first / KEYS * KEYS; base < end; base += KEYS) {
        const int at = base / KEYS % 2;
        if (!found) find(base);
        const KeyRows &keys = of_keys[at], &values = a.v.data ? of_values[at] : keys;  // a latent's begin its keys
        found = keys.in_place && values.in_place && base + KEYS < end;
        if (found) find(base + KEYS);
        const KeyRows *next_keys = found ? &of_keys[at ^ 1] : nullptr, *next_values = a.v.data ? &of_values[at ^ 1] : nullptr;
        Ahead ahead{next_keys, next_values, a.k_dim * a.k.size(), a.v_dim * v.size()};
        pack_keys(keys, ahead, key_words, key_words * PANEL, space.keys);
        if (dots) pack_values(values, ahead, a.v_dim, v_width, space.values);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int num = rows_of(tile);
            float* sums = space.sums + tile * TILE_ROWS * v_width;
            memset(space.scores, 0, sizeof(float) * TILE_ROWS * KEYS);
            for (int panel = 0; panel < KEY_PANELS; panel += num <= PAIRED_ROWS ? 2 : 1)
                add_product(
                    num, space.scores + panel * TILE_ROWS * PANEL, space.queries + tile * TILE_ROWS * k_words,
                    reinterpret_cast<const char*>(space.keys + panel * key_words * PANEL), kind, a.k_dim, dots,
                    num <= PAIRED_ROWS ? 4 * key_words * PANEL : 0);
            ahead.ask(ASKED_ROWS);
            for (int i = 0; i < num; i++) {
                const int64_t row = tile * TILE_ROWS + i, at = start + row / group;
                ahead.ask(ASKED_ROWS / 4);
                Floats weights[KEYS / LANES];
                float kept = soften(
                    a, space.scores + i * PANEL, weights, base, a.window ? at - a.window + 1 : 0, at,
                    space.maxima[row], space.totals[row]);
                store_weights<T>(space.weights + i * (dots ? KEYS / 2 : KEYS), weights, dots);
                if (kept == 1.0f) continue;
                for (float* sum = sums + i * v_width; sum < sums + (i + 1) * v_width; sum += LANES)
                    store(sum, load(sum) * kept);
            }
            ahead.ask(KEYS);  // what is left
            if (wide) {
                add_weighted(num, sums, v_width, space.weights, InPlace<float>{values}, a.v_dim);
            } else if (!dots) {
                add_weighted(num, sums, v_width, space.weights, InPlace<BFloat16>{values}, a.v_dim);
            } else {
#if defined(__AVX512BF16__)
                add_weighted(num, sums, v_width, space.weights, InPairs{space.values, v_width}, a.v_dim);
#endif
            }
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        T* to = out + (token + row / group) * out_stride + (head * group + row % group) * a.v_dim;
        for (int64_t d = 0; d < a.v_dim; d += LANES)
            store(to + d, load(space.sums + row * v_width + d) / space.totals[row] * a.v_scale, a.v_dim - d);
    }
}

// `q [tokens][heads * k_dim]`, `out [tokens][heads * v_dim]`.
template <class T>
inline void attend(
    Pool& pool, const Attention& a, const Batch& batch, const T* q, int64_t q_stride, const T* sinks, T* out,
    int64_t out_stride) {
    struct Tile {
        int64_t sequence, query, count;
    };
    static thread_local std::vector<Tile> tiles;
    tiles.clear();
    const int64_t most = std::max<int64_t>(1, 4 * TILE_ROWS / a.group());
    for (int64_t i = 0; i < batch.num_sequences; i++)
        for (int64_t query = 0; query < batch.counts[i]; query += most)
            tiles.push_back({i, query, std::min<int64_t>(most, batch.counts[i] - query)});
    const std::vector<Tile>& shared = tiles;
    pool.each(int64_t(shared.size()) * a.kv_heads, [&](int64_t task) {
        const Tile& tile = shared[task / a.kv_heads];
        attend_tile(
            a, batch, tile.sequence, tile.query, tile.count, task % a.kv_heads, q, q_stride, sinks, out, out_stride);
    });
}

}  // namespace holdfast
