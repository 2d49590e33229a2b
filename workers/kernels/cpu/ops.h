// The operations of a tape (see `ops.py`, whose structures mirror these).
#pragma once

#include "experts.h"

namespace holdfast {

struct Matrix {
    void* data;
    int64_t stride;  // elements from row to row

    template <class T>
    Rows<T> of() const {
        return {static_cast<T*>(data), stride};
    }
};

struct Norm {
    const void* weight;  // null: none
    int64_t wide;        // in fp32

    template <class T>
    NormWeight<T> of() const {
        return {weight, wide != 0};
    }
};

struct Context {
    Pool* pool;
    Batch batch;
    PackedRows packed;
};

// Every operation begins with its number and whether its rows are the samples, not the tokens.
struct Op {
    int32_t code, of_samples;

    int64_t rows(const Context& context) const {
        return of_samples ? context.batch.num_samples : context.batch.num_tokens;
    }
};

struct PrepareOp : Op {
    int64_t *tokens, *positions, *offsets, *logit_rows, page_size;

    template <class T>
    void run(Context& c) const {
        const Batch& b = c.batch;
        for (int64_t i = 0; i < b.num_tokens; i++) {
            tokens[i] = b.tokens[i];
            positions[i] = b.positions[i];
            offsets[i] = b.positions[i] % page_size;
        }
        for (int64_t i = 0; i < b.num_samples; i++) logit_rows[i] = b.logit_rows[i];
    }
};

struct PagesOp : Op {
    PageTable table;
    int64_t* pages;

    template <class T>
    void run(Context& c) const {
        const Batch& b = c.batch;
        for (int64_t i = 0; i < b.num_sequences; i++)
            for (int64_t j = 0; j < b.counts[i]; j++) pages[b.firsts[i] + j] = table.page(b.rows[i], b.starts[i] + j);
    }
};

struct EmbedOp : Op {
    const int64_t* tokens;
    Weight table;
    int64_t first, end;  // this rank's part of the vocabulary
    double scale;
    Matrix out;

    template <class T>
    void run(Context& c) const {
        each_row(*c.pool, rows(c), table.depth, [&](int64_t row) {
            T* to = out.of<T>().at(row);
            if (tokens[row] < first || tokens[row] >= end) {
                memset(static_cast<void*>(to), 0, table.depth * sizeof(T));
            } else {
                embed_row(table, tokens[row] - first, float(scale), to);
            }
        });
    }
};

struct GatherOp : Op {
    Matrix from;
    const int64_t* index;
    int64_t width;
    Matrix out;

    template <class T>
    void run(Context& c) const {
        for (int64_t row = 0; row < rows(c); row++)
            memcpy(out.of<T>().at(row), from.of<T>().at(index[row]), width * sizeof(T));
    }
};

struct AddNormOp : Op {
    Matrix x, delta, out, total;  // no delta: only the norm; no out: only the sum
    Norm norm;
    int64_t width;
    double eps;

    template <class T>
    void run(Context& c) const {
        each_row(*c.pool, rows(c), width, [&](int64_t row) {
            const T* at = x.of<T>().at(row);
            if (delta.data) {
                const T* added = delta.of<T>().at(row);
                T* sum = total.of<T>().at(row);
                for (int64_t i = 0; i < width; i += LANES)
                    store(sum + i, load(at + i, width - i) + load(added + i, width - i), width - i);
                at = sum;
            }
            if (out.data) norm_row(at, norm.of<T>(), width, float(eps), out.of<T>().at(row));
        });
    }
};

struct SquaresOp : Op {
    Matrix x;
    int64_t width;
    Matrix out;  // fp32

    template <class T>
    void run(Context& c) const {
        each_row(*c.pool, rows(c), width, [&](int64_t row) {
            *out.of<float>().at(row) = mean_square(x.of<T>().at(row), width);
        });
    }
};

struct ScaleNormOp : Op {
    Matrix x, mean_squares, out;  // the means in fp32, a sum over `ranks`
    Norm norm;
    int64_t width, ranks;
    double eps;

    template <class T>
    void run(Context& c) const {
        each_row(*c.pool, rows(c), width, [&](int64_t row) {
            float mean = *mean_squares.of<float>().at(row) / float(ranks);
            norm_row(x.of<T>().at(row), norm.of<T>(), width, float(eps), mean, out.of<T>().at(row));
        });
    }
};

struct LinearOp : Op {
    Matrix x;
    Weight weight;
    const void* bias;
    Matrix out;
    int64_t wide;  // the result is fp32

    template <class T>
    void run(Context& c) const {
        auto from = x.of<T>();
        auto* of_bias = static_cast<const T*>(bias);
        if (wide)
            linear(*c.pool, c.packed, from.data, x.stride, rows(c), weight, of_bias, static_cast<float*>(out.data), out.stride);
        else
            linear(*c.pool, c.packed, from.data, x.stride, rows(c), weight, of_bias, static_cast<T*>(out.data), out.stride);
    }
};

struct ByHeadOp : Op {
    Matrix x;
    int64_t x_head;  // elements from head to head
    Weight weight;   // of the first head; the others follow
    int64_t heads;
    Matrix out;
    int64_t out_head;

    template <class T>
    void run(Context& c) const {
        Weight of_head = weight;
        for (int64_t head = 0; head < heads; head++) {
            linear(
                *c.pool, c.packed, x.of<T>().data + head * x_head, x.stride, rows(c), of_head,
                static_cast<const T*>(nullptr), out.of<T>().data + head * out_head, out.stride);
            of_head.data += weight.panels() * weight.panel_bytes();
        }
    }
};

struct RotateOp : Op {
    Matrix x, rest, cos, sin, out;  // with `rest`: its heads of `rest_width` come before x's rotated ones
    int64_t heads, width, x_head, rest_width, rest_head, rope_dim;

    template <class T>
    void run(Context& c) const {
        each_row(*c.pool, rows(c), heads * (width + rest_width), [&](int64_t row) {
            T* to = out.of<T>().at(row);
            for (int64_t head = 0; head < heads; head++, to += width + rest_width) {
                if (rest.data) memcpy(static_cast<void*>(to), rest.of<T>().at(row) + head * rest_head, rest_width * sizeof(T));
                rotate_head<T>(
                    x.of<T>().at(row) + head * x_head, cos.of<T>().at(row), sin.of<T>().at(row), rope_dim, width,
                    to + rest_width);
            }
        });
    }
};

struct RotateAndWriteOp : Op {
    Matrix q, k, v, cos, sin, out;
    Norm q_norm, k_norm;
    int64_t heads, kv_heads, width, rope_dim;
    double eps;
    const int64_t *pages, *offsets;
    Pages k_pages, v_pages;
    double k_scale, v_scale;

    template <class T>
    void run(Context& c) const {
        each_row(*c.pool, rows(c), (heads + 2 * kv_heads) * width, [&](int64_t row) {
            const T *cos_at = cos.of<T>().at(row), *sin_at = sin.of<T>().at(row);
            struct Head;
            T* turned = scratch<Head, T>(width);
            auto turn = [&](const T* from, const Norm& norm, T* to) {
                if (norm.weight) {
                    norm_row(from, norm.of<T>(), width, float(eps), to);
                    from = to;
                }
                rotate_head(from, cos_at, sin_at, rope_dim, width, to);
            };
            for (int64_t head = 0; head < heads; head++)
                turn(q.of<T>().at(row) + head * width, q_norm, out.of<T>().at(row) + head * width);
            for (int64_t head = 0; head < kv_heads; head++) {
                turn(k.of<T>().at(row) + head * width, k_norm, turned);
                char* to = k_pages.at(pages[row], head, offsets[row], width);
                write_kv(k_pages, to, turned, width, float(k_scale));
                to = v_pages.at(pages[row], head, offsets[row], width);
                write_kv<T>(v_pages, to, v.of<T>().at(row) + head * width, width, float(v_scale));
            }
        });
    }
};

struct WriteLatentsOp : Op {
    Matrix latent, k_rope, cos, sin;
    Norm norm;
    int64_t rank, rope_dim;
    double eps;
    const int64_t *pages, *offsets;
    Pages k_pages;
    double scale;

    template <class T>
    void run(Context& c) const {
        each_row(*c.pool, rows(c), rank + rope_dim, [&](int64_t row) {
            struct Latent;
            T* whole = scratch<Latent, T>(rank + rope_dim);
            norm_row<T>(latent.of<T>().at(row), norm.of<T>(), rank, float(eps), whole);
            rotate_head<T>(
                k_rope.of<T>().at(row), cos.of<T>().at(row), sin.of<T>().at(row), rope_dim, rope_dim, whole + rank);
            char* to = k_pages.at(pages[row], 0, offsets[row], rank + rope_dim);
            write_kv(k_pages, to, whole, rank + rope_dim, float(scale));
        });
    }
};

struct AttendOp : Op {
    Attention attention;
    Matrix q;
    const void* sinks;
    Matrix out;

    template <class T>
    void run(Context& c) const {
        attend<T>(
            *c.pool, attention, c.batch, q.of<T>().data, q.stride, static_cast<const T*>(sinks), out.of<T>().data,
            out.stride);
    }
};

struct GatedOp : Op {
    Matrix gate_up;
    int64_t width;
    int32_t activation, unused;
    Matrix out;

    template <class T>
    void run(Context& c) const {
        each_row(*c.pool, rows(c), width, [&](int64_t row) {
            gated_row<T>(gate_up.of<T>().at(row), width, activation, 0.0f, 0.0f, out.of<T>().at(row));
        });
    }
};

struct RouteOp : Op {
    Matrix logits;  // fp32
    const float* choice_bias;
    Router router;
    int32_t* chosen;
    float* weights;

    template <class T>
    void run(Context& c) const {
        each_row(*c.pool, rows(c), 8 * router.num_experts, [&](int64_t row) {
            float* of_row = weights + row * router.top_k;
            route_row(router, logits.of<float>().at(row), choice_bias, chosen + row * router.top_k, of_row);
            for (int64_t i = 0; i < router.top_k; i++) of_row[i] = to_float(from_float<T>(of_row[i]));
        });
    }
};

struct ExpertsOp : Op {
    Experts experts;
    const void *gate_up_bias, *down_bias;
    Matrix x;
    const int32_t* chosen;
    const float* weights;
    Matrix out;

    template <class T>
    void run(Context& c) const {
        run_experts<T>(
            *c.pool, experts, x.of<const T>(), rows(c), chosen, weights, static_cast<const T*>(gate_up_bias),
            static_cast<const T*>(down_bias), out.of<T>());
    }
};

// `out = x + shared * sigmoid(gate)`; no gate: 1.
struct AddGatedOp : Op {
    Matrix x, shared, gate, out;
    int64_t width;

    template <class T>
    void run(Context& c) const {
        each_row(*c.pool, rows(c), width, [&](int64_t row) {
            float factor = gate.data ? 1.0f / (1.0f + std::exp(-to_float(*gate.of<T>().at(row)))) : 1.0f;
            for (int64_t i = 0; i < width; i += LANES) {
                const int64_t n = width - i;
                store(out.of<T>().at(row) + i, load(x.of<T>().at(row) + i, n) + load(shared.of<T>().at(row) + i, n) * factor, n);
            }
        });
    }
};

}  // namespace holdfast
