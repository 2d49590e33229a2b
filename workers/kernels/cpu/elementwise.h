// What a layer does between its products. Each row's result depends on the row alone.
#pragma once

#include "attention.h"

namespace holdfast {

template <class T>
struct Rows {
    T* data;
    int64_t stride;

    T* at(int64_t row) const { return data + row * stride; }
};

// Calls `act(row)` for each row; by several threads if that is worth their waking up.
template <class Act>
inline void each_row(Pool& pool, int64_t rows, int64_t width, const Act& act) {
    const int64_t chunk = std::max<int64_t>(1, 2048 / std::max<int64_t>(1, width));
    if (rows <= 2 * chunk) {
        for (int64_t row = 0; row < rows; row++) act(row);
        return;
    }
    pool.each((rows + chunk - 1) / chunk, [&](int64_t task) {
        for (int64_t row = task * chunk; row < std::min(rows, (task + 1) * chunk); row++) act(row);
    });
}

// A norm's weight: fp32, or of the activations' precision.
template <class T>
struct NormWeight {
    const void* data;
    bool wide;

    Floats at(int64_t i, int64_t count) const {
        return wide ? load(static_cast<const float*>(data) + i, count) : load(static_cast<const T*>(data) + i, count);
    }
};

template <class T>
inline float mean_square(const T* x, int64_t width) {
    Floats squares{};
    for (int64_t i = 0; i < width; i += LANES) {
        Floats value = load(x + i, width - i);
        squares += value * value;
    }
    return sum(squares) / float(width);
}

template <class T>
inline void norm_row(const T* x, const NormWeight<T>& weight, int64_t width, float eps, float mean_square, T* out) {
    const float factor = 1.0f / std::sqrt(mean_square + eps);
    for (int64_t i = 0; i < width; i += LANES)
        store(out + i, load(x + i, width - i) * factor * weight.at(i, width - i), width - i);
}

template <class T>
inline void norm_row(const T* x, const NormWeight<T>& weight, int64_t width, float eps, T* out) {
    norm_row(x, weight, width, eps, mean_square(x, width), out);
}

// Rotates the first `dim` elements of a head; `from` may be `to`.
template <class T>
inline void rotate_head(const T* from, const T* cos, const T* sin, int64_t dim, int64_t width, T* to) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t n = half - i;
        Floats low = load(from + i, n), high = load(from + half + i, n);
        store(to + i, low * load(cos + i, n) - high * load(sin + i, n), n);
        store(to + half + i, high * load(cos + half + i, n) + low * load(sin + half + i, n), n);
    }
    if (from != to) memcpy(to + dim, from + dim, (width - dim) * sizeof(T));
}

template <class T>
inline void write_kv(const Pages& pages, char* to, const T* from, int64_t dim, float scale) {
    if (pages.kind == FLOAT8) {
        for (int64_t d = 0; d < dim; d++) to[d] = char(to_fp8(to_float(from[d]) / scale));
    } else if (pages.kind == BFLOAT16) {
        for (int64_t d = 0; d < dim; d += LANES)
            store(reinterpret_cast<BFloat16*>(to) + d, load(from + d, dim - d), dim - d);
    } else {
        for (int64_t d = 0; d < dim; d += LANES)
            store(reinterpret_cast<float*>(to) + d, load(from + d, dim - d), dim - d);
    }
}

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };

inline Floats gate(Floats gate, Floats up, int32_t activation, float limit, float alpha) {
    if (activation == SILU) return gate * sigmoid(gate) * up;
    if (activation == GELU_TANH) {
        Floats inner = 0.7978845608f * (gate + 0.044715f * gate * gate * gate);
        return 0.5f * gate * (1.0f + tanh(inner)) * up;
    }
    gate = select(as<Words>(gate > limit), all(limit), gate);
    up = select(as<Words>(up > limit), all(limit), select(as<Words>(up < -limit), all(-limit), up));
    return (up + 1.0f) * gate * sigmoid(gate * alpha);
}

template <class T>
inline void gated_row(
    const T* gate_up, int64_t width, int32_t activation, float limit, float alpha, T* out) {
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t n = width - i;
        store(out + i, gate(load(gate_up + i, n), load(gate_up + width + i, n), activation, limit, alpha), n);
    }
}

// A row of an embedding that is stored in panels.
template <class T>
inline void embed_row(const Weight& table, int64_t row, float scale, T* out) {
    const char* panel = table.data + row / PANEL * table.panel_bytes();
    for (int64_t k = 0; k < table.depth; k++) {
        int64_t at = row % PANEL;
        float value;
        if (table.kind == BFLOAT16) {
            value = to_float(reinterpret_cast<const BFloat16*>(panel)[k / 2 * 2 * PANEL + 2 * at + k % 2]);
        } else if (table.kind == INT8) {
            value = float(reinterpret_cast<const int8_t*>(panel)[k * PANEL + at]) * table.scales[row];
        } else {
            value = reinterpret_cast<const float*>(panel)[k * PANEL + at];
        }
        // Rounded before it is scaled, as a product of two tensors is.
        out[k] = from_float<T>(scale == 1.0f ? value : to_float(from_float<T>(value)) * scale);
    }
}

}  // namespace holdfast
