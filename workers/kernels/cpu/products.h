// Matrix products with weights in panels.
//
// A panel holds 32 rows of a weight, side by side: what a step of the sum over k needs lies together. bf16 goes in
// pairs of k, as dot products of bf16 take it. Every element of a result is one sum, over k from the first to the
// last, in one accumulator: its bits do not depend on how many rows there are, or on which thread computes it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "pool.h"
#include "simd.h"

namespace holdfast {

constexpr int PANEL = 32;

// Their sums fill most of the registers: 28 of AVX-512's 32, 12 of AVX2's 16, beside two columns and a row. SSE's sums
// need another for each product.
constexpr int TILE_ROWS = LANES == 16 ? 14 : LANES == 8 ? 6 : 4;
constexpr int tile_vectors(int rows) { return LANES == 16 || rows > 2 ? 2 : 4; }

enum Kind : int32_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

struct Weight {
    const char* data;     // panels
    const float* scales;  // int8: one a row
    int64_t rows, depth;
    int32_t kind;

    int64_t panels() const { return (rows + PANEL - 1) / PANEL; }
    int64_t panel_bytes() const {
        int64_t elements = PANEL * (kind == BFLOAT16 ? depth + depth % 2 : depth);
        return elements * (kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1);
    }
};

// Rows `weight [rows, depth]` as panels. bf16 by words of two.
template <class T>
inline void pack_panels(const T* weight, int64_t rows, int64_t depth, T* panels) {
    constexpr int PAIR = sizeof(T) == 2 ? 2 : 1;
    int64_t padded = (depth + PAIR - 1) / PAIR * PAIR;
    for (int64_t row = 0; row < (rows + PANEL - 1) / PANEL * PANEL; row++) {
        T* to = panels + row / PANEL * padded * PANEL + row % PANEL * PAIR;
        for (int64_t k = 0; k < padded; k++) {
            T value{};
            if (row < rows && k < depth) value = weight[row * depth + k];
            to[k / PAIR * PANEL * PAIR + k % PAIR] = value;
        }
    }
}

// ---- the rows: tiles of up to TILE_ROWS, by k ----------------------------------------------------

struct Pairs {};  // two of bf16 in a word, for the CPU's dot products
template <class T>
constexpr bool DOTS = false;
#if defined(__AVX512BF16__)
template <>
inline constexpr bool DOTS<BFloat16> = true;
#endif

// Whether the product of rows of T with a weight is by dot products of bf16; else it is in fp32.
template <class T>
inline bool by_dots(int32_t kind) {
    return DOTS<T> && kind == BFLOAT16;
}

inline int64_t packed_words(bool dots, int64_t depth) { return dots ? (depth + 1) / 2 : depth; }

// `count` rows as words by k: `to[k * count + row]`.
template <class T>
inline void pack_rows(const T* const* rows, int count, int64_t depth, bool dots, uint32_t* to) {
    const int64_t num_words = packed_words(dots, depth), whole = dots ? depth / 2 : depth;
    int64_t first = 0;
    if (count > LANES / 4) {
        const bool in_words = dots || std::is_same_v<T, float>;
        float widened[LANES * LANES];
        const char* from[LANES];
        for (int i = 0; i < LANES; i++) {
            const int row = std::min(i, count - 1);
            from[i] = in_words ? reinterpret_cast<const char*>(rows[row])
                               : reinterpret_cast<const char*>(widened + row * LANES);
        }
        // By squares, whose rows are stored whole. What is too much of the last must fit too.
        for (; first + LANES <= whole && (first + LANES - 1) * count + LANES <= num_words * count; first += LANES) {
            if (!in_words)
                for (int row = 0; row < count; row++) store(widened + row * LANES, load(rows[row] + first));
            transpose(from, in_words ? 4 * first : 0, to + first * count, count);
        }
    }
    for (int row = 0; row < count; row++) {
        const T* from = rows[row];
        for (int64_t k = first; k < num_words; k++) {
            uint32_t& word = to[k * count + row];
            if (!dots) word = as<uint32_t>(to_float(from[k]));
            else if (k < whole) word = read<uint32_t>(from + 2 * k);
            else word = read<uint16_t>(from + 2 * k);
        }
    }
}

// Else each product reads it again, and AVX2's loads take longer than its sums.
inline Floats in_register(Floats x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm("" : "+x"(x));
#endif
    return x;
}

// How many bytes before its turn a weight is asked for: no hardware guesses what lies past a page's end, nor, where a
// panel is read in two halves, that every other line comes next. With fewer rows the sums are so quick that the CPU is
// as far ahead by itself.
constexpr int64_t AHEAD = 4096;
constexpr int ASKING_ROWS = LANES == 16 ? 4 : 3;

// ---- the sums of a tile --------------------------------------------------------------------------

// Adds to `sums [P][TILE_ROWS][PANEL]` (S vectors of each panel, from `sums` on) the products of M `rows` and of P
// panels, `bytes` apart. `anew`: to nothing, whatever `sums` holds.
template <int M, int S, int P, class T>
[[gnu::noinline]] void add_tile(
    float* sums, const uint32_t* rows, const T* panel, int64_t bytes, int64_t steps, bool anew) {
    constexpr int V = S * P;
    auto sums_of = [&](int m, int v) { return sums + (v / S * TILE_ROWS + m) * PANEL + v % S * LANES; };
    auto words_of = [&](const char* at, int v) { return at + v / S * bytes + v % S * 4 * LANES; };
    Floats acc[M][V];
    unrolled<M>([&](auto m) INLINED {
        unrolled<V>([&](auto v) INLINED { acc[m][v] = anew ? Floats{} : load(sums_of(m, v)); });
    });
    if constexpr (std::is_same_v<T, Pairs>) {
#if defined(__AVX512BF16__)
        const char* at = reinterpret_cast<const char*>(panel);
        for (int64_t k = 0; k < steps; k++, at += 4 * PANEL, rows += M) {
            __m512bh columns[V];
            unrolled<V>([&](auto v) INLINED {
                columns[v] = read<__m512bh>(words_of(at, v));
                if constexpr (M >= ASKING_ROWS) __builtin_prefetch(words_of(at, v) + AHEAD);
            });
            unrolled<M>([&](auto m) INLINED {
                auto row = as<__m512bh>(_mm512_set1_epi32(int(rows[m])));
                unrolled<V>([&](auto v) INLINED {
                    acc[m][v] = Floats(_mm512_dpbf16_ps(__m512(acc[m][v]), row, columns[v]));
                });
            });
        }
#endif
    } else if constexpr (std::is_same_v<T, BFloat16>) {
        const float* row = reinterpret_cast<const float*>(rows);
        const char* at = reinterpret_cast<const char*>(panel);
        for (int64_t k = 0; k < steps; k += 2, at += 4 * PANEL, row += 2 * M) {
            Words pairs[V];
            Floats columns[V];
            unrolled<V>([&](auto v) INLINED {
                pairs[v] = read<Words>(words_of(at, v));
                columns[v] = as<Floats>(pairs[v] << 16);
                if constexpr (M >= ASKING_ROWS && v % (16 / LANES) == 0) __builtin_prefetch(words_of(at, v) + AHEAD);
            });
            unrolled<M>([&](auto m) INLINED {
                unrolled<V>([&](auto v) INLINED { acc[m][v] = multiply_add(all(row[m]), columns[v], acc[m][v]); });
            });
            if (k + 1 == steps) break;
            unrolled<V>([&](auto v) INLINED { columns[v] = as<Floats>(pairs[v] & 0xFFFF0000); });
            unrolled<M>([&](auto m) INLINED {
                unrolled<V>([&](auto v) INLINED { acc[m][v] = multiply_add(all(row[M + m]), columns[v], acc[m][v]); });
            });
        }
    } else {
        const float* row = reinterpret_cast<const float*>(rows);
        const int64_t apart = bytes / int64_t(sizeof(T));
        for (int64_t k = 0; k < steps; k++, panel += PANEL, row += M) {
            Floats columns[V];
            unrolled<V>([&](auto v) INLINED {
                columns[v] = in_register(load(panel + v / S * apart + v % S * LANES));
                if constexpr (v % S == 0 && (sizeof(T) == 1 || (LANES < 16 && M >= ASKING_ROWS)))
                    __builtin_prefetch(panel + v / S * apart + AHEAD / int64_t(sizeof(T)));
            });
            unrolled<M>([&](auto m) INLINED {
                unrolled<V>([&](auto v) INLINED { acc[m][v] = multiply_add(all(row[m]), columns[v], acc[m][v]); });
            });
        }
    }
    unrolled<M>([&](auto m) INLINED { unrolled<V>([&](auto v) INLINED { store(sums_of(m, v), acc[m][v]); }); });
}

template <int M, int P, class T>
inline void add_panel(
    float* sums, const uint32_t* rows, const T* panel, int64_t bytes, int64_t steps, bool anew) {
    constexpr int S = tile_vectors(M);
    for (int v = 0; v < PANEL / LANES; v += S) {
        constexpr int BYTES = std::is_same_v<T, int8_t> ? 1 : 4;  // of a column's share of a step: bf16 in pairs
        const char* at = reinterpret_cast<const char*>(panel) + v * LANES * BYTES;
        add_tile<M, S, P>(sums + v * LANES, rows, reinterpret_cast<const T*>(at), bytes, steps, anew);
    }
}

// A sum waits for the one before. So a few rows take two panels at a time.
constexpr int PAIRED_ROWS = LANES == 16 ? 7 : 1;

// `steps`: over k, in pairs for dot products.
template <class T, int M, int P>
inline void add_rows(
    int count, float* sums, const uint32_t* rows, const T* panel, int64_t bytes, int64_t steps, bool anew) {
    if (count == M) return add_panel<M, P>(sums, rows, panel, bytes, steps, anew);
    if constexpr (M > 1) add_rows<T, M - 1, P>(count, sums, rows, panel, bytes, steps, anew);
}
template <class T>
inline void add_rows(
    int count, float* sums, const uint32_t* rows, const char* panel, int64_t steps, int64_t bytes, bool anew) {
    auto* at = reinterpret_cast<const T*>(panel);
    if (bytes) return add_rows<T, PAIRED_ROWS, 2>(count, sums, rows, at, bytes, steps, anew);
    add_rows<T, TILE_ROWS, 1>(count, sums, rows, at, bytes, steps, anew);
}

// The product of `count` packed rows with a panel of `kind`; and with another, if it is given how many `bytes` further
// that begins.
inline void multiply(
    int count, float* sums, const uint32_t* rows, const char* panel, int32_t kind, int64_t depth, bool dots,
    int64_t bytes = 0) {
    if (dots) return add_rows<Pairs>(count, sums, rows, panel, (depth + 1) / 2, bytes, true);
    if (kind == FLOAT32) return add_rows<float>(count, sums, rows, panel, depth, bytes, true);
    if (kind == BFLOAT16) return add_rows<BFloat16>(count, sums, rows, panel, depth, bytes, true);
    add_rows<int8_t>(count, sums, rows, panel, depth, bytes, true);
}

// A panel of int8, from `panel` on, as fp32.
inline void widen_panel(const int8_t* panel, int64_t depth, float* to) {
    for (int64_t i = 0; i < depth * PANEL; i += LANES) store(to + i, load(panel + i));
}

// ---- a whole product -----------------------------------------------------------------------------

// Rows that are computed with the same panel while it is near.
constexpr int BLOCK_ROWS = TILE_ROWS * (LANES == 16 ? 8 : LANES == 8 ? 16 : 24);
// Of a panel of int8 that many rows read, so much is converted at a time. bf16 is converted between a tile's sums: its
// two instructions cost less than fp32 panels, which a first cache does not hold.
constexpr int64_t WIDE_DEPTH = LANES == 16 ? 512 : 128;
constexpr int64_t WIDENING_TILES = 3;

// Rows `x`, packed tile by tile, of one product. Tiles have as many rows as one another, or one more: the sums of a few
// rows that are left over would wait for one another.
struct PackedRows {
    std::vector<uint32_t> words;
    int64_t count = 0, depth = 0, each = 0, more = 0;  // each tile's rows; how many tiles have one more
    bool dots = false;

    int64_t tiles() const { return (count + TILE_ROWS - 1) / TILE_ROWS; }
    int rows_of(int64_t tile) const { return int(each + (tile < more)); }
    int64_t first_row(int64_t tile) const { return tile * each + std::min(tile, more); }
    const uint32_t* at(int64_t tile) const { return words.data() + first_row(tile) * packed_words(dots, depth); }

    // `row(i)`: the i-th row.
    template <class T, class Row>
    void pack(Pool& pool, int64_t num_rows, int64_t width, bool by_dots, const Row& row) {
        count = num_rows, depth = width, dots = by_dots;
        if (count) each = count / tiles(), more = count % tiles();
        size_t wanted = size_t(count) * packed_words(dots, depth);
        if (words.size() < wanted) words.resize(wanted);
        auto act = [&](int64_t tile) {
            const T* rows[TILE_ROWS];
            for (int i = 0; i < rows_of(tile); i++) rows[i] = row(first_row(tile) + i);
            uint32_t* to = words.data() + first_row(tile) * packed_words(dots, depth);
            pack_rows(rows, rows_of(tile), depth, dots, to);
        };
        if (tiles() < 4) {
            for (int64_t tile = 0; tile < tiles(); tile++) act(tile);
        } else {
            pool.each(tiles(), act);
        }
    }
};

// How many tasks there are for a block of rows. Of a few, a task takes two panels, this many apart: one from each half
// of the weight, so that tasks in their order read on where the one before ended.
inline int64_t panel_tasks(const PackedRows& x, const Weight& w) {
    return x.count <= PAIRED_ROWS ? (w.panels() + 1) / 2 : w.panels();
}

// Calls `done(row, column, sums, columns)` for each row of a block and each panel of a task, with fp32 sums.
template <class Done>
inline void panel_product(const PackedRows& x, int64_t block, const Weight& w, int64_t task, const Done& done) {
    struct Sums;
    struct Wide;
    const int64_t apart = panel_tasks(x, w), num = task + apart < w.panels() ? 2 : 1;
    int64_t first = block * (BLOCK_ROWS / TILE_ROWS);
    int64_t end = std::min(x.tiles(), first + BLOCK_ROWS / TILE_ROWS);
    float* sums = scratch<Sums, float>(size_t(BLOCK_ROWS) * PANEL);
    const char* data = w.data + task * w.panel_bytes();
    auto of = [&](int64_t tile) { return sums + (tile - first) * TILE_ROWS * PANEL; };
    if (w.kind != INT8 || end - first < WIDENING_TILES) {
        for (int64_t tile = first; tile < end; tile++)
            multiply(
                x.rows_of(tile), of(tile), x.at(tile), data, w.kind, x.depth, x.dots,
                num == 2 ? apart * w.panel_bytes() : 0);
    } else {
        float* wide = scratch<Wide, float>(WIDE_DEPTH * PANEL);
        for (int64_t k = 0; k < x.depth; k += WIDE_DEPTH) {
            int64_t depth = std::min(WIDE_DEPTH, x.depth - k);
            widen_panel(reinterpret_cast<const int8_t*>(data) + k * PANEL, depth, wide);
            for (int64_t tile = first; tile < end; tile++) {
                int count = x.rows_of(tile);
                const char* at = reinterpret_cast<const char*>(wide);
                add_rows<float>(count, of(tile), x.at(tile) + k * count, at, depth, 0, k == 0);
            }
        }
    }
    for (int64_t p = 0; p < num; p++) {
        const int64_t column = (task + p * apart) * PANEL;
        const int columns = int(std::min<int64_t>(PANEL, w.rows - column));
        for (int64_t tile = first; tile < end; tile++) {
            for (int i = 0; i < x.rows_of(tile); i++) {
                float* row = of(tile) + (p * TILE_ROWS + i) * PANEL;
                if (w.kind == INT8) {
                    const float* scales = w.scales + column;
                    for (int v = 0; v < columns; v += LANES)
                        store(row + v, load(row + v) * load(scales + v, columns - v));
                }
                done(x.first_row(tile) + i, column, row, columns);
            }
        }
    }
}

// `out = sums + bias` of some columns of a row.
template <class Out, class T>
inline void write_sums(Out* out, const float* sums, const T* bias, int columns) {
    for (int v = 0; v < columns; v += LANES) {
        Floats value = load(sums + v);
        if (bias) value += load(bias + v, columns - v);
        store(out + v, value, columns - v);
    }
}

template <class T, class Out>
inline void linear(
    Pool& pool, PackedRows& packed, const T* x, int64_t x_stride, int64_t rows, const Weight& w, const T* bias,
    Out* out, int64_t out_stride) {
    packed.pack<T>(pool, rows, w.depth, by_dots<T>(w.kind), [&](int64_t row) { return x + row * x_stride; });
    int64_t tasks = panel_tasks(packed, w), blocks = (packed.tiles() * TILE_ROWS + BLOCK_ROWS - 1) / BLOCK_ROWS;
    pool.each(blocks * tasks, [&](int64_t task) {
        panel_product(packed, task / tasks, w, task % tasks, [&](int64_t row, int64_t column, float* sums, int n) {
            write_sums(out + row * out_stride + column, sums, bias ? bias + column : nullptr, n);
        });
    });
}

}  // namespace holdfast
