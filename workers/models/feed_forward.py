"""The feed-forward parts: an MLP, and a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.kernels.backend import Backend
from workers.kernels.grouped_experts import ExpertProducts
from workers.kernels.products import Products
from workers.models.spec import ExpertsSpec, MLPSpec, RouterSpec


@dataclass(slots=True)
class MLPWeights:
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(slots=True)
class ExpertsWeights:
    """This rank's experts, or its share of each."""

    router: Tensor
    router_bias: Tensor | None
    choice_bias: Tensor | None
    """fp32 ``[experts]``"""
    gate_up: Tensor
    """``[experts, 2 * size, hidden]``"""
    gate_up_bias: Tensor | None
    down: Tensor
    """``[experts, hidden, size]``"""
    down_bias: Tensor | None
    shared: MLPWeights | None
    shared_gate: Tensor | None


def mlp(x: Tensor, spec: MLPSpec, w: MLPWeights, kernels: Backend) -> Tensor:
    """This rank's share of an MLP ``[tokens, hidden]``, to be summed over the ranks."""
    linear = kernels.products.linear
    gated = kernels.elementwise.gated(linear(x, w.gate_up, w.gate_up_bias), spec.activation)
    return linear(gated, w.down, w.down_bias)


def experts(x: Tensor, spec: ExpertsSpec, w: ExpertsWeights, kernels: Backend) -> Tensor:
    """This rank's share of a mixture of experts ``[tokens, hidden]``, to be summed over the ranks."""
    chosen, weights = route(x, spec.router, w, kernels.products)
    products = ExpertProducts(
        w.gate_up,
        w.gate_up_bias,
        w.down,
        w.down_bias,
        first=spec.first,
        num_experts=spec.router.num_experts,
        clamped=spec.activation == "clamped_swiglu",
        limit=spec.limit,
        alpha=spec.alpha,
    )
    out = kernels.experts.run(x, chosen, weights, products)
    if spec.shared is not None and w.shared is not None:
        shared = mlp(x, spec.shared, w.shared, kernels)
        if w.shared_gate is not None:
            shared = shared * torch.sigmoid(kernels.products.linear(x, w.shared_gate))
        out = out + shared
    return out


def route(x: Tensor, spec: RouterSpec, w: ExpertsWeights, products: Products) -> tuple[Tensor, Tensor]:
    """Each token's experts, int64 ``[tokens, top_k]``, and their weights in x's dtype."""
    bias = None if w.router_bias is None else w.router_bias.float()
    logits = products.linear(x.float(), w.router.float(), bias)
    if spec.score == "top_softmax":
        values, chosen = logits.topk(spec.top_k, dim=-1)
        return chosen, values.softmax(-1).to(x.dtype)
    scores = logits.sigmoid() if spec.score == "sigmoid" else logits.softmax(-1)
    choice = scores if w.choice_bias is None else scores + w.choice_bias
    if spec.num_groups > 1:
        groups = choice.view(-1, spec.num_groups, spec.num_experts // spec.num_groups)
        group_scores = groups.topk(2, dim=-1).values.sum(-1) if spec.group_by_two else groups.amax(-1)
        best = group_scores.topk(spec.top_groups, dim=-1).indices
        others = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
        hidden = others.unsqueeze(-1).expand_as(groups).reshape(choice.shape)
        choice = choice.masked_fill(hidden, -torch.inf if w.choice_bias is not None else 0.0)
    chosen = choice.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, (weights * spec.scale).to(x.dtype)
