// Gumbel noise as kernels/noise.py defines it, for sampling.
#pragma once

#include <algorithm>
#include <cmath>

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

// Adds noise to the logits `[begin, end)` of a row. `keys`: the row's pair. Where the sum cannot be the largest, -inf.
//
// Noise has a value above g only if u > exp(-exp(-g)), and then 1 - u < exp(-g). So a random word says in fp32 whether
// its logit can reach the largest sum yet. Few can, and the two logarithms are taken of few.
inline void add_noise(const uint32_t* keys, int64_t begin, int64_t end, float* logits) {
    uint32_t at[LANES];
    for (int i = 0; i < LANES; i++) at[i] = uint32_t(begin + i);
    const Words tokens = read<Words>(at);
    auto random = [&](int64_t first) {
        Words token = tokens + uint32_t(first - begin);
        return mixed(mixed(token * 0x9E3779B9 + keys[0]) ^ keys[1]);
    };
    auto noisy = [&](Floats given, Words bits) {
        HalfWords halves[2];
        memcpy(halves, &bits, sizeof bits);
        HalfFloats noise[2] = {gumbel(halves[0]), gumbel(halves[1])};
        return given + read<Floats>(noise);
    };
    auto given_at = [&](int64_t first) {
        if (end - first >= LANES) return load(logits + first);
        Floats given = all(-INFINITY);
        memcpy(&given, logits + first, sizeof(float) * (end - first));
        return given;
    };
    Floats highest = all(-INFINITY);
    for (int64_t first = begin; first < end; first += LANES) highest = larger(given_at(first), highest);
    float reached = largest(highest) + LEAST_NOISE;
    for (int64_t first = begin; first < end; first += LANES) {
        const Floats given = given_at(first);
        const Words bits = random(first);
        // The margin is for the roundings of sums and of the exponential.
        const float margin = 1e-3f + 1e-6f * std::fabs(reached);
        const Floats left = __builtin_convertvector(as<Ints>(~bits >> 1), Floats) * 0x1p-31f;
        const Ints out = left > exp(given - reached + margin);
        Floats sum = all(-INFINITY);
        if (!every(out)) {
            sum = noisy(given, bits);
            reached = std::max(reached, largest(sum));
        }
        store(logits + first, sum, long(end - first));
    }
}

// Adds noise to rows of logits. `keys`: a pair for each row.
inline void add_noise(Pool& pool, const uint32_t* keys, int64_t num_rows, int64_t vocab_size, float* logits) {
    constexpr int64_t PART = 2048;  // a task of some microseconds
    const int64_t parts = (vocab_size + PART - 1) / PART;
    pool.each(num_rows * parts, [&](int64_t task) {
        int64_t row = task / parts, begin = task % parts * PART;
        add_noise(keys + 2 * row, begin, std::min(vocab_size, begin + PART), logits + row * vocab_size);
    });
}

}  // namespace holdfast
