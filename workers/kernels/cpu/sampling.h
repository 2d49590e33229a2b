// The choice of tokens as kernels/sampling.py defines it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace holdfast {

constexpr int HALF = LANES / 2;
typedef double Doubles __attribute__((vector_size(8 * HALF)));
typedef int64_t Longs __attribute__((vector_size(8 * HALF)));
typedef uint32_t HalfWords __attribute__((vector_size(4 * HALF)));
typedef float HalfFloats __attribute__((vector_size(4 * HALF)));

// Of normal, positive numbers, to 2 ulp: the series of the inverse hyperbolic tangent.
inline Doubles log(Doubles x) {
    Longs bits = as<Longs>(x);
    Longs exponent = (bits >> 52) - 1023;
    Doubles m = as<Doubles>((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000);
    Longs big = as<Longs>(m > 1.4142135623730951);
    m = as<Doubles>(as<Longs>(m) - (big & (int64_t(1) << 52)));  // half of it
    exponent -= big;
    const Doubles magic = Doubles{} + 6755399441055744.0;  // 1.5 * 2^52: an integer is added to its bits
    Doubles e = as<Doubles>(as<Longs>(magic) + exponent) - magic;
    Doubles s = (m - 1.0) / (m + 1.0), z = s * s, p = Doubles{} + 2.0 / 23.0;
    for (double n = 21.0; n > 1.0; n -= 2.0) p = p * z + 2.0 / n;
    return e * 1.90821492927058770002e-10 + (s * p * z + 2.0 * s) + e * 6.93147180369123816490e-01;
}

inline Words mixed(Words x) {
    x ^= x >> 16;
    x *= 0x7FEB352D;
    x ^= x >> 15;
    x *= 0x846CA68B;
    return x ^ (x >> 16);
}

inline HalfFloats gumbel(HalfWords bits) {
    Doubles uniform = (__builtin_convertvector(bits, Doubles) + 0.5) * 0x1p-32;
    return __builtin_convertvector(-log(-log(uniform)), HalfFloats);
}

constexpr float LEAST_NOISE = -3.14f;  // -log(-log(2^-33)), rounded down

// The largest of some numbers and its place. Of equal ones the first; NaN before all others, as torch's argmax.
struct Largest {
    float value = -INFINITY;
    int64_t token = 0;

    void take(Largest other) {
        const bool nan = std::isnan(value), other_nan = std::isnan(other.value);
        const bool equal = value == other.value || (nan && other_nan);
        if (equal ? other.token < token : other_nan || (!nan && other.value > value)) *this = other;
    }
};

// The same for each lane of vectors that follow each other.
struct LargestOfLanes {
    Floats values = all(-INFINITY);
    Words tokens;

    explicit LargestOfLanes(Words first) : tokens(first) {}

    void take(Floats other, Words at) {
        const Words is_larger = as<Words>((other > values) | ((other != other) & (values == values)));
        values = select(is_larger, other, values);
        tokens = (at & is_larger) | (tokens & ~is_larger);
    }
    Largest of_all() const {
        Largest result{values[0], int64_t(tokens[0])};
        for (int i = 1; i < LANES; i++) result.take({values[i], int64_t(tokens[i])});
        return result;
    }
};

inline Words lanes_from(int64_t first) {
    uint32_t at[LANES];
    for (int i = 0; i < LANES; i++) at[i] = uint32_t(first + i);
    return read<Words>(at);
}

// Logits from `first` on, before `end`; -inf in the lanes past it.
inline Floats logits_at(const float* logits, int64_t first, int64_t end) {
    if (end - first >= LANES) return load(logits + first);
    Floats given = all(-INFINITY);
    memcpy(&given, logits + first, sizeof(float) * (end - first));
    return given;
}

inline Largest largest_of(int64_t begin, int64_t end, const float* logits) {
    LargestOfLanes found(lanes_from(begin));
    for (int64_t first = begin; first < end; first += LANES)
        found.take(logits_at(logits, first, end), lanes_from(first));
    return found.of_all();
}

// The largest sum of a logit, divided by the temperature, and noise, among the tokens `[begin, end)` of a row. `keys`:
// the row's pair.
//
// Noise has a value above g only if u > exp(-exp(-g)), and then 1 - u < exp(-g). So a random word says in fp32 whether
// its logit can reach the largest sum yet. Few can, and the two logarithms are taken of few.
inline Largest drawn_of(
    const uint32_t* keys, float temperature, int64_t begin, int64_t end, const float* logits) {
    auto random = [&](Words tokens) { return mixed(mixed(tokens * 0x9E3779B9 + keys[0]) ^ keys[1]); };
    auto noisy = [&](Floats given, Words bits) {
        HalfWords halves[2];
        memcpy(halves, &bits, sizeof bits);
        HalfFloats noise[2] = {gumbel(halves[0]), gumbel(halves[1])};
        return given + read<Floats>(noise);
    };
    Floats highest = all(-INFINITY);
    for (int64_t first = begin; first < end; first += LANES) highest = larger(logits_at(logits, first, end), highest);
    float reached = largest(highest) / temperature + LEAST_NOISE;
    const float inverse = 1.0f / temperature;
    LargestOfLanes found(lanes_from(begin));
    for (int64_t first = begin; first < end; first += LANES) {
        const Floats of_tokens = logits_at(logits, first, end);
        const Words tokens = lanes_from(first), bits = random(tokens);
        // The margin is for the roundings of products and sums.
        const float margin = 1e-3f + 1e-6f * std::fabs(reached);
        const Floats left = __builtin_convertvector(as<Ints>(~bits >> 1), Floats) * 0x1p-31f;
        const Floats beyond = of_tokens * inverse - reached + margin;
        const Ints out = (left > exp_limit(beyond)) & (beyond == beyond);
        if (every(out)) continue;
        const Floats sum = noisy(of_tokens / temperature, bits);
        reached = std::max(reached, largest(sum));
        found.take(sum, tokens);
    }
    return found.of_all();
}

// A token for each row of logits: the likeliest or, given `temperatures` and a pair of `keys` for each row, a sample.
inline void choose(
    Pool& pool, const float* temperatures, const uint32_t* keys, int64_t num_rows, int64_t vocab_size,
    const float* logits, int64_t* tokens) {
    constexpr int64_t PART = 2048;  // a task of some microseconds
    const int64_t parts = (vocab_size + PART - 1) / PART;
    std::vector<Largest> found(num_rows * parts);
    pool.each(num_rows * parts, [&](int64_t task) {
        const int64_t row = task / parts, begin = task % parts * PART, end = std::min(vocab_size, begin + PART);
        const float* of_row = logits + row * vocab_size;
        found[task] = temperatures ? drawn_of(keys + 2 * row, temperatures[row], begin, end, of_row)
                                   : largest_of(begin, end, of_row);
    });
    for (int64_t row = 0; row < num_rows; row++) {
        Largest largest = found[row * parts];
        for (int64_t part = 1; part < parts; part++) largest.take(found[row * parts + part]);
        tokens[row] = largest.token;
    }
}

// Forbids, in some rows of logits, the tokens without a bit in the row's `words`, lowest bits first.
inline void mask(
    Pool& pool, const int32_t* rows, int64_t num_rows, const uint32_t* words, int64_t num_words, int64_t vocab_size,
    float* logits) {
    pool.each(num_rows, [&](int64_t row) {
        float* of_row = logits + rows[row] * vocab_size;
        for (int64_t first = 0; first < vocab_size; first += 32) {
            const uint32_t word = words[row * num_words + first / 32];
            if (word == 0xFFFFFFFF) continue;
            const int64_t count = std::min<int64_t>(32, vocab_size - first);
            for (int64_t i = 0; i < count; i++) of_row[first + i] = word >> i & 1 ? of_row[first + i] : -INFINITY;
        }
    });
}

}  // namespace holdfast
