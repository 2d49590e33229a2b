// Vectors as wide as the CPU's, and what is loaded into them and stored from them: GCC's vector extensions.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace holdfast {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

struct BFloat16 {
    uint16_t bits;
};

#define INLINED __attribute__((always_inline))

// Calls `act` with each of 0 to N - 1 as a constant. An array with no other index lies in registers, if they suffice:
// of loops that are unrolled late, compilers keep it in memory.
template <int N, class Act>
INLINED inline void unrolled(const Act& act) {
    auto call = [&]<int... I>(std::integer_sequence<int, I...>) INLINED { (act(std::integral_constant<int, I>{}), ...); };
    call(std::make_integer_sequence<int, N>{});
}

template <class To, class From>
inline To as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

template <class T>
inline T read(const void* at) {
    T value;
    memcpy(&value, at, sizeof value);
    return value;
}

inline Floats all(float value) { return value - Floats{}; }

// What compilers do to __builtin_convertvector of these is slow.
inline Words widened(Halves halves) {
#if defined(__AVX512F__)
    return as<Words>(_mm512_cvtepu16_epi32(as<__m256i>(halves)));
#elif defined(__AVX2__)
    return as<Words>(_mm256_cvtepu16_epi32(as<__m128i>(halves)));
#else
    return __builtin_convertvector(halves, Words);
#endif
}
// Of words below 2^16.
inline Halves narrowed(Words words) {
#if defined(__AVX512F__)
    return as<Halves>(_mm512_cvtepi32_epi16(as<__m512i>(words)));
#elif defined(__AVX2__)
    __m256i packed = _mm256_packus_epi32(as<__m256i>(words), _mm256_setzero_si256());
    return as<Halves>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xD8)));
#else
    return __builtin_convertvector(words, Halves);
#endif
}

// Anywhere in memory. What is read with memcpy and written with it, compilers copy word by word.
typedef float Unaligned __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline Floats load(const float* at) { return *reinterpret_cast<const Unaligned*>(at); }
inline Floats load(const BFloat16* at) { return as<Floats>(widened(read<Halves>(at)) << 16); }
inline Floats load(const int8_t* at) {
#if defined(__AVX512F__)
    return Floats(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(read<__m128i>(at))));
#elif defined(__AVX2__)
    return Floats(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(read<int64_t>(at)))));
#else
    return __builtin_convertvector(read<Bytes>(at), Floats);
#endif
}

inline void store(float* at, Floats value) { *reinterpret_cast<Unaligned*>(at) = value; }
inline void store(BFloat16* at, Floats value) {
    // To the nearest, ties to even; NaN stays NaN.
    Words bits = as<Words>(value);
    Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    Words nan = as<Words>((bits & 0x7FFFFFFF) > 0x7F800000);
    Halves halves = narrowed((rounded & ~nan) | (0x7FC0 & nan));
    memcpy(at, &halves, sizeof halves);
}

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return as<float>(uint32_t(value.bits) << 16); }
template <class T>
inline T from_float(float value) {
    if constexpr (sizeof(T) == sizeof(float)) {
        return value;
    } else {
        T lanes[LANES];
        store(lanes, all(value));
        return lanes[0];
    }
}

// `count` elements, perhaps fewer than a vector; the other lanes are zero.
template <class T>
inline Floats load(const T* at, long count) {
    if (count >= LANES) return load(at);
    T lanes[LANES] = {};
    memcpy(lanes, at, count * sizeof(T));
    return load(lanes);
}
template <class T>
inline void store(T* at, Floats value, long count) {
    if (count >= LANES) return store(at, value);
    T lanes[LANES];
    store(lanes, value);
    memcpy(at, lanes, count * sizeof(T));
}

// A vector's upper half is combined with its lower, until one lane is left.
#if defined(__AVX512F__)
inline float sum(Floats value) { return _mm512_reduce_add_ps(__m512(value)); }
inline float largest(Floats value) { return _mm512_reduce_max_ps(__m512(value)); }
#else
template <class Act>
inline float reduced(Floats value, const Act& act) {
    float lanes[LANES];
    store(lanes, value);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = act(lanes[i], lanes[i + width]);
    return lanes[0];
}
inline float sum(Floats value) {
    return reduced(value, [](float a, float b) { return a + b; });
}
inline float largest(Floats value) {
    return reduced(value, [](float a, float b) { return a > b ? a : b; });
}
#endif

inline Floats select(Words mask, Floats yes, Floats no) {
    return as<Floats>((as<Words>(yes) & mask) | (as<Words>(no) & ~mask));
}
// Whether a comparison holds in every lane.
inline bool every(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(__m512i(mask), __m512i(mask)) == 0xFFFF;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(__m256(as<Floats>(mask))) == 0xFF;
#else
    bool result = true;
    for (int i = 0; i < LANES; i++) result = result && mask[i];
    return result;
#endif
}

// `a * b + c`, rounded once if the CPU can. Written as a product and a sum, GCC rounds it once or twice, as it sees fit:
// for Zen 2 and 3, twice in a loop with one accumulator and once with several, so the bits depended on the rows beside.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return Floats(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__AVX2__) && defined(__FMA__)
    return Floats(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
    return a * b + c;
#endif
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

constexpr float LEAST_EXPONENT = -87.3f;  // e to it is the smallest normal number, about

// e^x to 2 ulp, after Cephes' expf, for x between that and 88.7; exactly 1 at 0.
[[gnu::always_inline]] inline Floats exp_in_range(Floats x) {
    const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Floats n = (x * 1.44269504f + magic) - magic;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return p * as<Floats>(power);
}
// For any x; 0 below the smallest normal number.
[[gnu::always_inline]] inline Floats exp(Floats x) {
    const Ints below = x < LEAST_EXPONENT;
    x = x > 88.7f ? all(88.7f) : below ? all(LEAST_EXPONENT) : x;
    return below ? Floats{} : exp_in_range(x);
}
// For x of at most 0.
[[gnu::always_inline]] inline Floats exp_of_negative(Floats x) {
    return x < LEAST_EXPONENT ? Floats{} : exp_in_range(x);
}
// At least e^x or 1, whatever is less, and at most 1.07 times that: lines between powers of two (Schraudolph, 1999).
// Not for NaN.
[[gnu::always_inline]] inline Floats exp_limit(Floats x) {
    x = x > 0.0f ? Floats{} : x < LEAST_EXPONENT ? all(LEAST_EXPONENT) : x;
    return as<Floats>(__builtin_convertvector(x * 12102203.2f + 1065353216.0f, Ints));
}
inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }
inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

// LANES rows of as many words, from byte `offset` on, as columns `to_stride` words apart. Stored in order: with a smaller
// stride than LANES, what is too much of one is overwritten by the next.
inline void transpose(const char* const* rows, long offset, uint32_t* to, long to_stride) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + offset);
    for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xDD);
        b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xDD);
    }
    for (int i = 0; i < 8; i++) _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88));
    for (int i = 0; i < 8; i++)
        _mm512_storeu_si512(to + (8 + i) * to_stride, _mm512_shuffle_i32x4(b[i], b[8 + i], 0xDD));
#elif defined(__AVX2__)
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = read<__m256i>(rows[i] + offset);
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        a[4 * i] = _mm256_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm256_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm256_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm256_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 8; i++) {
        __m256i column = i < 4 ? _mm256_permute2x128_si256(a[i], a[4 + i], 0x20)
                               : _mm256_permute2x128_si256(a[i - 4], a[i], 0x31);
        memcpy(to + i * to_stride, &column, sizeof column);
    }
#else
    for (int j = 0; j < LANES; j++)
        for (int i = 0; i < LANES; i++) to[j * to_stride + i] = read<uint32_t>(rows[i] + offset + 4 * j);
#endif
}

}  // namespace holdfast
