// Keys and values in their pages, a block at a time: where they lie, and how products take them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "products.h"

namespace holdfast {

constexpr int KEYS = 64;
enum : int32_t { FLOAT8 = 3 };  // E4M3, of KV alone

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
    int first, end;  // of those that may be read, and of their neighbours up to whole vectors: the others are not set

    static bool lie_in_place(const Pages& pages, int64_t dim) {
        return pages.kind != FLOAT8 && dim * pages.size() % int64_t(sizeof(Floats)) == 0;
    }

    // `[first, end)`: what may be read; the rest is zero. `copies`: room for the rows, and one more, if they are copied.
    void find(
        const Pages& pages, const PageTable& table, int64_t row, int64_t head, int64_t base, int64_t first, int64_t end,
        int64_t dim, char* copies) {
        const int64_t size = dim * pages.size(), bytes = row_bytes(pages, dim);
        const bool in_place = lie_in_place(pages, dim);
        const int64_t from = std::max(base, first) - base, to = std::min(base + KEYS, end) - base;
        memset(copies + KEYS * bytes, 0, bytes);
        this->first = int(from / LANES * LANES), this->end = int((to + LANES - 1) / LANES * LANES);
        for (int64_t j = this->first; j < from; j++) rows[j] = copies + KEYS * bytes;
        for (int64_t j = to; j < this->end; j++) rows[j] = copies + KEYS * bytes;
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

// How much of the next block has been asked for when a part of the work on this one is done.
constexpr float KEYS_PACKED = 0.35f, VALUES_PACKED = 0.4f, SCORED = 0.42f, SOFTENED = 0.5f;

inline int64_t lines(int64_t bytes) { return (bytes + 63) / 64; }

// Asks for the lines of the next block, whose place no hardware guesses: into the second cache, and all along the work
// on this one, because what is asked for faster than memory answers is dropped.
class Ahead {
  public:
    // `keys`, `values`: the next block's rows, of which the first is set; null: none.
    Ahead(const KeyRows* keys, const KeyRows* values, int64_t key_lines, int64_t value_lines)
        : keys_(keys), values_(values), key_lines_(key_lines), value_lines_(value_lines) {
        if (keys) at_ = keys->rows[0], left_ = key_lines;
    }

    // The work up to `part` of it takes so many steps from here.
    void begin(float part, int64_t steps) {
        const float end = keys_ ? part * float(keys_->end * (key_lines_ + value_lines_)) : 0;
        each_ = (end - due_) / float(steps);
    }

    // Asks for what is due after one of them.
    void step() {
        due_ += each_;
        for (; asked_ < int(due_); asked_++, at_ += 64) {
            __builtin_prefetch(at_, 0, 2);
            if (--left_ == 0) turn();
        }
    }

  private:
    // To the row's values, or to the next row's keys.
    void turn() {
        const bool of_key = in_keys_ && value_lines_;
        if (!of_key && ++row_ == keys_->end) return;
        in_keys_ = !of_key;
        at_ = (of_key ? values_ : keys_)->rows[row_] - 64;
        left_ = of_key ? value_lines_ : key_lines_;
    }

    const KeyRows *keys_, *values_;
    int64_t key_lines_, value_lines_, left_ = 0;
    const char* at_ = nullptr;
    float each_ = 0, due_ = 0;
    int asked_ = 0, row_ = 0;
    bool in_keys_ = true;
};

// Keys as panels of their words: `[words][PANEL]`, one panel after another, `panel_words` apart.
inline void pack_keys(const KeyRows& keys, Ahead& ahead, int64_t words, int64_t panel_words, uint32_t* to) {
    ahead.begin(KEYS_PACKED, (keys.end - keys.first) / LANES * (words / LANES));
    for (int j = keys.first; j < keys.end; j += LANES) {
        uint32_t* panel = to + j / PANEL * panel_words + j % PANEL;
        for (int64_t word = 0; word < words; word += LANES) {
            ahead.step();
            transpose(keys.rows + j, 4 * word, panel + word * PANEL, PANEL);
        }
    }
}

// A block's values for a product with its weights: what a word of a weight is multiplied with, LANES columns from
// `column` on.
template <class T>
struct InPlace {
    static constexpr int STEPS = KEYS;
    const KeyRows& values;

    int first() const { return values.first; }
    int end() const { return values.end; }
    Floats at(int k, int64_t column) const { return load(reinterpret_cast<const T*>(values.rows[k]) + column); }
    static Floats add(Floats sum, uint32_t weight, Floats value) {
        return multiply_add(all(as<float>(weight)), value, sum);
    }
};
#if defined(__AVX512BF16__)
// Of bf16, in pairs of keys.
struct Pairs16 {
    static constexpr int STEPS = KEYS / 2;

    static Floats add(Floats sum, uint32_t weight, __m512bh value) {
        return Floats(_mm512_dpbf16_ps(__m512(sum), as<__m512bh>(_mm512_set1_epi32(int(weight))), value));
    }
};
struct InRows : Pairs16 {
    const KeyRows& values;

    explicit InRows(const KeyRows& rows) : values(rows) {}
    int first() const { return values.first / 2; }
    int end() const { return values.end / 2; }
    __m512bh at(int k, int64_t column) const {
        typedef uint16_t Places __attribute__((vector_size(64)));
        const Places turns = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                              8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
        auto half = [&](int key) { return _mm512_castsi256_si512(read<__m256i>(values.rows[key] + 2 * column)); };
        return as<__m512bh>(_mm512_permutex2var_epi16(half(2 * k), as<__m512i>(turns), half(2 * k + 1)));
    }
};
// `[STEPS][width]` words: for many rows.
struct InPairs : Pairs16 {
    const InRows rows;
    uint32_t* words;
    int64_t width;

    InPairs(const KeyRows& values, uint32_t* to, int64_t columns) : rows(values), words(to), width(columns) {}
    void pack(Ahead& ahead, int64_t dim) {
        ahead.begin(VALUES_PACKED, end() - first());
        for (int k = first(); k < end(); k++) {
            ahead.step();
            for (int64_t column = 0; column < dim; column += LANES) {
                const __m512bh pairs = rows.at(k, column);
                memcpy(words + k * width + column, &pairs, sizeof pairs);
            }
        }
    }
    int first() const { return rows.first(); }
    int end() const { return rows.end(); }
    __m512bh at(int k, int64_t column) const { return read<__m512bh>(words + k * width + column); }
};
#endif

}  // namespace holdfast
