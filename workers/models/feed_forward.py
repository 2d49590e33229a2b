"""The feed-forward parts: an MLP, and a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from workers.kernels.elementwise import Elementwise
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


def mlp(x: Tensor, spec: MLPSpec, w: MLPWeights, ops: Elementwise) -> Tensor:
    """This rank's share of an MLP ``[tokens, hidden]``, to be summed over the ranks."""
    return linear(ops.gated(linear(x, w.gate_up, w.gate_up_bias), spec.activation), w.down, w.down_bias)


def experts(x: Tensor, spec: ExpertsSpec, w: ExpertsWeights, ops: Elementwise) -> Tensor:
    """This rank's share of a mixture of experts ``[tokens, hidden]``, to be summed over the ranks.

    Tokens are sorted by expert, each expert that has tokens computes them in one product, and each token
    sums its experts' outputs in the order of its choices, whatever else the batch holds (law L14).
    """
    chosen, weights = route(x, spec.router, w)
    top_k = spec.router.top_k
    order = chosen.flatten().argsort(stable=True)
    rows = x[order // top_k]
    outputs = torch.zeros_like(rows)
    counts = chosen.flatten().bincount(minlength=spec.router.num_experts).tolist()
    last = spec.first + (spec.num_local or spec.router.num_experts)
    start = sum(counts[: spec.first])
    for expert, count in enumerate(counts[spec.first : last]):
        if count:
            outputs[start : start + count] = _expert(rows[start : start + count], expert, spec, w)
            start += count
    by_token = torch.empty_like(outputs)
    by_token[order] = outputs
    out = (by_token.view(-1, top_k, x.shape[-1]) * weights[..., None]).sum(1).to(x.dtype)
    if spec.shared is not None and w.shared is not None:
        shared = mlp(x, spec.shared, w.shared, ops)
        if w.shared_gate is not None:
            shared = shared * torch.sigmoid(linear(x, w.shared_gate))
        out = out + shared
    return out


def route(x: Tensor, spec: RouterSpec, w: ExpertsWeights) -> tuple[Tensor, Tensor]:
    """Each token's experts, int64 ``[tokens, top_k]``, and their weights in x's dtype."""
    logits = linear(x.float(), w.router.float(), None if w.router_bias is None else w.router_bias.float())
    if spec.score == "top_softmax":
        values, chosen = logits.topk(spec.top_k, dim=-1)
        return chosen, values.softmax(-1).to(x.dtype)
    scores = logits.sigmoid() if spec.score == "sigmoid" else logits.softmax(-1)
    choice = scores if w.choice_bias is None else scores + w.choice_bias
    if spec.num_groups > 1:
        groups = choice.view(-1, spec.num_groups, spec.num_experts // spec.num_groups)
        group_scores = groups.topk(2, dim=-1).values.sum(-1) if spec.group_by_two else groups.amax(-1)
        best = group_scores.topk(spec.top_groups, dim=-1).indices
        allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
        hidden = ~allowed[..., None].expand_as(groups).reshape(choice.shape)
        choice = choice.masked_fill(hidden, -torch.inf if w.choice_bias is not None else 0.0)
    chosen = choice.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, (weights * spec.scale).to(x.dtype)


def _expert(x: Tensor, expert: int, spec: ExpertsSpec, w: ExpertsWeights) -> Tensor:
    both = linear(x, w.gate_up[expert], None if w.gate_up_bias is None else w.gate_up_bias[expert])
    gate, up = both.chunk(2, dim=-1)
    if spec.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        hidden = (up + 1) * gate * torch.sigmoid(gate * spec.alpha)
    else:
        hidden = silu(gate) * up
    return linear(hidden, w.down[expert], None if w.down_bias is None else w.down_bias[expert])
