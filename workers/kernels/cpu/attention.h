// Attention over page tables, in place, for every KV group: grouped heads, windows, sinks, softcap, latents.
//
// A task is some queries of a sequence and one KV head. It goes over the keys in blocks of 64 that begin at multiples
// of 64, with a running maximum and sum (FlashAttention, arXiv:2205.14135): a query's result does not depend on the
// queries beside it, on chunks, or on the size of pages.
#pragma once

#include "kv_blocks.h"
#include "products.h"

namespace holdfast {

constexpr int KEY_PANELS = KEYS / PANEL;

// What a step computes: sequence after sequence.
struct Batch {
    int64_t num_tokens, num_samples, num_sequences;
    const int32_t *tokens, *rows, *starts, *counts, *logit_rows;
    // Derived: by token, its position; by sequence, its first token.
    const int32_t *positions, *firsts;
};

struct Attention {
    PageTable table;
    Pages k, v;  // latents: v is the first `v_dim` of k
    int64_t heads, kv_heads, k_dim, v_dim, window;
    float scale, softcap, v_scale;

    int64_t group() const { return heads / kv_heads; }
};

// Adds to M rows of `sums`, `width` apart and shrunk by `kept`, V vectors from `column` on of the product of
// `weights [M][STEPS]` and values. The weights of those that there are not are 0, which adds nothing.
template <int M, int V, class Values>
[[gnu::noinline]] void add_values(
    float* sums, int64_t width, const float* kept, const uint32_t* weights, const Values& values, int64_t column,
    Ahead& ahead) {
    Floats acc[M][V];
    auto sums_of = [&](int m, int v) { return sums + m * width + column + v * LANES; };
    unrolled<M>([&](auto m) INLINED {
        unrolled<V>([&](auto v) INLINED { acc[m][v] = load(sums_of(m, v)) * kept[m]; });
    });
    for (int k = values.first(); k < values.end(); k++) {
        ahead.step();
        decltype(values.at(0, 0)) columns[V];
        unrolled<V>([&](auto v) INLINED { columns[v] = values.at(k, column + v * LANES); });
        unrolled<M>([&](auto m) INLINED {
            const uint32_t weight = weights[m * Values::STEPS + k];
            unrolled<V>([&](auto v) INLINED { acc[m][v] = Values::add(acc[m][v], weight, columns[v]); });
        });
    }
    unrolled<M>([&](auto m) INLINED { unrolled<V>([&](auto v) INLINED { store(sums_of(m, v), acc[m][v]); }); });
}

// How many columns of values are computed at a time for so many rows.
constexpr int columns_at_once(int rows) { return (rows <= PAIRED_ROWS || tile_vectors(rows) == 4 ? 4 : 2) * LANES; }

template <class Values, int M = TILE_ROWS>
inline void add_weighted(
    int count, float* sums, int64_t width, const float* kept, const uint32_t* weights, const Values& values, int64_t dim,
    Ahead& ahead) {
    if constexpr (M > 1) {
        if (count < M) return add_weighted<Values, M - 1>(count, sums, width, kept, weights, values, dim, ahead);
    }
    int64_t column = 0;
    if constexpr (columns_at_once(M) == 4 * LANES)
        for (; dim - column > 3 * LANES; column += 4 * LANES)
            add_values<M, 4>(sums, width, kept, weights, values, column, ahead);
    for (; dim - column > LANES; column += 2 * LANES) add_values<M, 2>(sums, width, kept, weights, values, column, ahead);
    if (column < dim) add_values<M, 1>(sums, width, kept, weights, values, column, ahead);
}

// Scratch of one task, for `rows` queries.
struct AttentionSpace {
    struct Tag;
    uint32_t *queries, *keys, *values, *weights;
    float *scores, *sums, *maxima, *totals;  // the last two `[tiles][LANES]`

    AttentionSpace(int64_t rows, int64_t k_words, int64_t v_width, int64_t key_words) {
        const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, padded = tiles * TILE_ROWS, lanes = tiles * LANES;
        int64_t sizes[] = {padded * k_words * 2, KEY_PANELS * key_words, v_width * KEYS / 2, TILE_ROWS * KEYS,
                           TILE_ROWS * KEYS,     padded * v_width,       lanes,              lanes};
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

// A tile's scores of a block as weights; and by what its rows' sums so far shrink, `kept`. `start`: the position of the
// tile's first query.
template <class T>
inline void soften(
    const Attention& a, float* scores, int num, int64_t base, int64_t start, int64_t first_row, float* maxima,
    float* totals, uint32_t* weights, bool dots, float* kept, Ahead& ahead) {
    constexpr int VECTORS = PANEL / LANES, ALL = KEYS / LANES;
    auto at = [&](int i, int v) { return scores + (v / VECTORS * TILE_ROWS + i) * PANEL + v % VECTORS * LANES; };
    float highest[LANES] = {};
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const int64_t group = a.group();
    int64_t last = start + first_row / group, of_query = first_row % group;
    for (int i = 0; i < num; i++) {
        const int64_t first = a.window ? last - a.window + 1 : 0;
        ahead.step();
        Floats row[ALL];
        unrolled<ALL>([&](auto v) INLINED { row[v] = load(at(i, v)) * a.scale; });
        if (a.softcap > 0)
            unrolled<ALL>([&](auto v) INLINED { row[v] = a.softcap * tanh(row[v] / a.softcap); });
        if (base < first || base + KEYS - 1 > last) {
            unrolled<ALL>([&](auto v) INLINED {
                Ints key = lane + int32_t(base + v * LANES);
                row[v] = (key >= int32_t(first)) & (key <= int32_t(last)) ? row[v] : all(-INFINITY);
            });
        }
        Floats highs = row[0];
        unrolled<ALL>([&](auto v) INLINED {
            store(at(i, v), row[v]);
            highs = larger(highs, row[v]);
        });
        highest[i] = largest(highs);
        if (++of_query == group) of_query = 0, last++;
    }
    const Floats before = load(maxima), after = larger(before, load(highest));
    store(maxima, after);
    const Floats reached = after == -INFINITY ? Floats{} : after;  // a row may have no key yet
    store(kept, exp_of_negative(before - reached));
    float sums[LANES] = {};
    for (int i = 0; i < num; i++) {
        Floats row[ALL], added{};
        unrolled<ALL>([&](auto v) INLINED {
            row[v] = exp_of_negative(load(at(i, v)) - reached[i]);
            added += row[v];
        });
        sums[i] = sum(added);
        store_weights<T>(weights + i * (dots ? KEYS / 2 : KEYS), row, dots);
    }
    store(totals, load(totals) * load(kept) + load(sums));
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
        const int64_t at = row / TILE_ROWS * LANES + row % TILE_ROWS;
        space.maxima[at] = sinks ? to_float(sinks[head * group + row % group]) : -INFINITY;
        space.totals[at] = sinks ? 1.0f : 0.0f;
    }
    memset(space.sums, 0, sizeof(float) * rows * v_width);

    struct Copies;
    const Pages& v = a.v.data ? a.v : a.k;
    const int64_t k_bytes = (KEYS + 1) * KeyRows::row_bytes(a.k, a.k_dim);
    const int64_t v_bytes = (KEYS + 1) * KeyRows::row_bytes(v, a.v_dim);
    char* copies = scratch<Copies, char>(k_bytes + v_bytes);
    KeyRows of_keys[2], of_values[2];  // of this block and the next, in turn, if it is in place
    const bool in_place = KeyRows::lie_in_place(a.k, a.k_dim) && KeyRows::lie_in_place(v, a.v_dim);
    auto find = [&](int64_t base) {
        const int at = base / KEYS % 2;
        of_keys[at].find(a.k, a.table, table_row, head, base, first, end, a.k_dim, copies);
        if (a.v.data) of_values[at].find(a.v, a.table, table_row, head, base, first, end, a.v_dim, copies + k_bytes);
    };
    bool found = false;
    for (int64_t base = first / KEYS * KEYS; base < end; base += KEYS) {
        const int at = base / KEYS % 2, then = at ^ 1;
        if (!found) find(base);
        found = in_place && base + KEYS < end;
        if (found) find(base + KEYS);
        const KeyRows &keys = of_keys[at], &values = a.v.data ? of_values[at] : keys;  // a latent's begin its keys
        Ahead ahead{
            found ? &of_keys[then] : nullptr, &of_values[then], lines(a.k_dim * a.k.size()),
            a.v.data ? lines(a.v_dim * v.size()) : 0};
        pack_keys(keys, ahead, key_words, key_words * PANEL, space.keys);
#if defined(__AVX512BF16__)
        InPairs pairs(values, space.values, v_width);
        if (dots && tiles > 1) pairs.pack(ahead, a.v_dim);
#endif
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int num = rows_of(tile);
            float* sums = space.sums + tile * TILE_ROWS * v_width;
            // What lies in a panel beside keys that were packed has scores that are not used.
            const int first_panel = keys.first / PANEL, panels = (keys.end + PANEL - 1) / PANEL - first_panel;
            const int at_once = num <= PAIRED_ROWS && panels == 2 ? 2 : 1;
            ahead.begin(SCORED, panels / at_once);
            for (int panel = first_panel; panel < first_panel + panels; panel += at_once) {
                ahead.step();
                multiply(
                    num, space.scores + panel * TILE_ROWS * PANEL, space.queries + tile * TILE_ROWS * k_words,
                    reinterpret_cast<const char*>(space.keys + panel * key_words * PANEL), kind, a.k_dim, dots,
                    at_once == 2 ? 4 * key_words * PANEL : 0);
            }
            float kept[LANES];
            ahead.begin(SOFTENED, num);
            soften<T>(
                a, space.scores, num, base, start, tile * TILE_ROWS, space.maxima + tile * LANES,
                space.totals + tile * LANES, space.weights, dots, kept, ahead);
            const int64_t passes = (a.v_dim + columns_at_once(num) - 1) / columns_at_once(num);
            ahead.begin(1.0f, passes * (keys.end - keys.first) / (dots ? 2 : 1));
            if (wide) {
                add_weighted(num, sums, v_width, kept, space.weights, InPlace<float>{values}, a.v_dim, ahead);
            } else if (!dots) {
                add_weighted(num, sums, v_width, kept, space.weights, InPlace<BFloat16>{values}, a.v_dim, ahead);
            } else {
#if defined(__AVX512BF16__)
                if (tiles > 1) add_weighted(num, sums, v_width, kept, space.weights, pairs, a.v_dim, ahead);
                else add_weighted(num, sums, v_width, kept, space.weights, InRows(values), a.v_dim, ahead);
#endif
            }
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        T* to = out + (token + row / group) * out_stride + (head * group + row % group) * a.v_dim;
        const float total = space.totals[row / TILE_ROWS * LANES + row % TILE_ROWS];
        for (int64_t d = 0; d < a.v_dim; d += LANES)
            store(to + d, load(space.sums + row * v_width + d) / total * a.v_scale, a.v_dim - d);
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
