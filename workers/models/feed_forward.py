"""The feed-forward parts: an MLP, and a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workers.kernels.backend import Backend
from workers.kernels.grouped_experts import ExpertProducts
from workers.kernels.products import Weight
from workers.models.spec import ExpertsSpec, MLPSpec


@dataclass(slots=True)
class MLPWeights:
    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None


@dataclass(slots=True)
class ExpertsWeights:
    """This rank's experts, or its share of each."""

    router: Weight
    router_bias: Tensor | None
    choice_bias: Tensor | None
    """fp32 ``[experts]``"""
    gate_up: Weight
    """``[experts, 2 * size, hidden]``"""
    gate_up_bias: Tensor | None
    down: Weight
    """``[experts, hidden, size]``"""
    down_bias: Tensor | None
    shared: MLPWeights | None
    shared_gate: Weight | None


def mlp(x: Tensor, spec: MLPSpec, w: MLPWeights, kernels: Backend) -> Tensor:
    """This rank's share of an MLP ``[tokens, hidden]``, to be summed over the ranks."""
    linear = kernels.products.linear
    gated = kernels.elementwise.gated(linear(x, w.gate_up, w.gate_up_bias), spec.activation)
    return linear(gated, w.down, w.down_bias)


def experts(x: Tensor, spec: ExpertsSpec, w: ExpertsWeights, kernels: Backend) -> Tensor:
    """This rank's share of a mixture of experts ``[tokens, hidden]``, to be summed over the ranks."""
    logits = kernels.products.scores(x, w.router, w.router_bias)
    chosen, weights = kernels.experts.route(logits, w.choice_bias, spec.router, x.dtype)
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
        gate = None if w.shared_gate is None else kernels.products.linear(x, w.shared_gate)
        out = kernels.elementwise.add_gated(out, shared, gate)
    return out
