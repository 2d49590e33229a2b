// A mixture of experts: each token's rows with its experts' weights.
#pragma once

#include <algorithm>
#include <numeric>

#include "elementwise.h"

namespace holdfast {

struct Experts {
    Weight gate_up, down;  // of the first expert; the others follow
    int64_t num, first, top_k;
    int32_t activation;
    float limit, alpha;

    static Weight of(const Weight& weight, int64_t expert) {
        Weight result = weight;
        result.data += expert * weight.panels() * weight.panel_bytes();
        if (result.scales) result.scales += expert * weight.rows;
        return result;
    }
};

struct ExpertRows {
    int64_t expert;
    std::vector<int64_t> places;  // token * top_k + choice
    PackedRows packed;
};

// `out[token] = sum over its choices, in their order, of weight * expert(x[token])`.
template <class T>
inline void run_experts(
    Pool& pool, const Experts& e, Rows<const T> x, int64_t num_tokens, const int32_t* chosen, const float* weights,
    const T* gate_up_bias, const T* down_bias, Rows<T> out) {
    const int64_t hidden = e.down.rows, width = e.down.depth;
    std::vector<ExpertRows> experts;
    std::vector<int64_t> of(e.num, -1);
    for (int64_t place = 0; place < num_tokens * e.top_k; place++) {
        int64_t expert = chosen[place] - e.first;
        if (expert < 0 || expert >= e.num) continue;
        if (of[expert] < 0) {
            of[expert] = int64_t(experts.size());
            experts.push_back({expert, {}, {}});
        }
        experts[of[expert]].places.push_back(place);
    }
    static thread_local std::vector<T> both, inner, outputs;
    both.resize(num_tokens * e.top_k * 2 * width);
    inner.resize(num_tokens * e.top_k * width);
    outputs.assign(num_tokens * e.top_k * hidden, T{});
    T *both_at = both.data(), *inner_at = inner.data(), *outputs_at = outputs.data();

    auto product = [&](const Weight& weight, const T* bias, auto row, T* to) {
        struct Task {
            int64_t index, block, panel;
        };
        std::vector<Task> tasks;
        for (size_t i = 0; i < experts.size(); i++) {
            auto& rows = experts[i];
            rows.packed.template pack<T>(
                pool, int64_t(rows.places.size()), weight.depth, by_dots<T>(weight.kind),
                [&](int64_t at) { return row(rows.places[at]); });
            int64_t blocks = (rows.packed.tiles() * TILE_ROWS + BLOCK_ROWS - 1) / BLOCK_ROWS;
            for (int64_t block = 0; block < blocks; block++)
                for (int64_t panel = 0; panel < panel_tasks(rows.packed, weight); panel++)
                    tasks.push_back({int64_t(i), block, panel});
        }
        pool.each(int64_t(tasks.size()), [&](int64_t task) {
            auto [index, block, panel] = tasks[task];
            const ExpertRows& rows = experts[index];
            const T* of_bias = bias ? bias + rows.expert * weight.rows : nullptr;
            panel_product(
                rows.packed, block, Experts::of(weight, rows.expert), panel,
                [&](int64_t at, int64_t column, float* sums, int n) {
                    write_sums(to + rows.places[at] * weight.rows + column, sums, of_bias ? of_bias + column : nullptr, n);
                });
        });
    };

    product(e.gate_up, gate_up_bias, [&](int64_t place) { return x.at(place / e.top_k); }, both_at);
    each_row(pool, num_tokens * e.top_k, width, [&](int64_t place) {
        int64_t expert = chosen[place] - e.first;
        if (expert >= 0 && expert < e.num)
            gated_row(both_at + place * 2 * width, width, e.activation, e.limit, e.alpha, inner_at + place * width);
    });
    product(e.down, down_bias, [&](int64_t place) { return inner_at + place * width; }, outputs_at);
    each_row(pool, num_tokens, hidden * e.top_k, [&](int64_t token) {
        for (int64_t i = 0; i < hidden; i += LANES) {
            Floats total{};
            for (int64_t choice = 0; choice < e.top_k; choice++) {
                int64_t place = token * e.top_k + choice;
                total += load(outputs_at + place * hidden + i, hidden - i) * weights[place];
            }
            store(out.at(token) + i, total, hidden - i);
        }
    });
}

struct Router {
    int32_t score;  // 0: the softmax of the chosen, 1: softmax, 2: sigmoid
    int64_t num_experts, top_k, num_groups, top_groups;
    bool group_by_two, normalize;
    float scale;
};

// The places of the `count` largest of `values`, largest first; the first of equals.
inline void largest(const float* values, int64_t size, int64_t count, int64_t* places) {
    std::vector<int64_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t a, int64_t b) {
        return values[a] > values[b] || (values[a] == values[b] && a < b);
    });
    std::copy_n(order.begin(), count, places);
}

// One token's experts and their weights (see `TorchExperts.route`).
inline void route_row(const Router& r, const float* logits, const float* choice_bias, int32_t* chosen, float* weights) {
    const int64_t num = r.num_experts;
    std::vector<int64_t> picked(r.top_k);
    auto softmax = [](const float* from, int64_t count, float* to) {
        float most = *std::max_element(from, from + count), total = 0;
        for (int64_t i = 0; i < count; i++) total += to[i] = std::exp(from[i] - most);
        for (int64_t i = 0; i < count; i++) to[i] /= total;
    };
    if (r.score == 0) {
        largest(logits, num, r.top_k, picked.data());
        for (int64_t i = 0; i < r.top_k; i++) chosen[i] = int32_t(picked[i]), weights[i] = logits[picked[i]];
        softmax(weights, r.top_k, weights);
        return;
    }
    std::vector<float> scores(num), choice(num);
    if (r.score == 1) softmax(logits, num, scores.data());
    else for (int64_t i = 0; i < num; i++) scores[i] = 1.0f / (1.0f + std::exp(-logits[i]));
    for (int64_t i = 0; i < num; i++) choice[i] = scores[i] + (choice_bias ? choice_bias[i] : 0.0f);
    if (r.num_groups > 1) {
        const int64_t size = num / r.num_groups;
        std::vector<float> of_groups(r.num_groups);
        std::vector<int64_t> best(std::max<int64_t>(2, r.num_groups));
        for (int64_t g = 0; g < r.num_groups; g++) {
            const float* group = choice.data() + g * size;
            largest(group, size, r.group_by_two ? 2 : 1, best.data());
            of_groups[g] = group[best[0]] + (r.group_by_two ? group[best[1]] : 0.0f);
        }
        largest(of_groups.data(), r.num_groups, r.top_groups, best.data());
        std::vector<float> kept(num, choice_bias ? -INFINITY : 0.0f);
        for (int64_t i = 0; i < r.top_groups; i++)
            std::copy_n(choice.data() + best[i] * size, size, kept.data() + best[i] * size);
        choice = kept;
    }
    largest(choice.data(), num, r.top_k, picked.data());
    float total = 0;
    for (int64_t i = 0; i < r.top_k; i++) {
        chosen[i] = int32_t(picked[i]);
        total += weights[i] = scores[picked[i]];
    }
    for (int64_t i = 0; i < r.top_k; i++) weights[i] *= r.scale / (r.normalize ? total + 1e-20f : 1.0f);
}

}  // namespace holdfast
