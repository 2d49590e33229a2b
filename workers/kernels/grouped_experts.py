"""The products of a mixture of experts: each token's rows with its experts' weights.

``TorchExperts`` defines them and runs on CPU; ``TritonExperts`` computes all experts in two kernels, and the host
never learns how many tokens each of them has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from workers.kernels.products import Weight, as_tensor


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Which experts compute a token, and with which weights."""

    num_experts: int
    top_k: int
    score: str = "softmax"
    """``softmax`` or ``sigmoid`` over all experts, or ``top_softmax`` over the chosen ones."""
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    """Experts are chosen from this many of the groups (DeepSeek's group-limited routing)."""
    group_by_two: bool = False
    """A group's score is the sum of its two best experts', not its best one's."""
    bias: bool = False
    choice_bias: bool = False
    """A bias that takes part in choosing, not in weighing (arXiv:2408.15664)."""


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """One layer's experts on this rank: ``experts`` of them, from number ``first`` on."""

    gate_up: Weight
    """``[experts, 2 * size, hidden]``"""
    gate_up_bias: Tensor | None
    down: Weight
    """``[experts, hidden, size]``"""
    down_bias: Tensor | None
    first: int
    num_experts: int
    """Of all ranks."""
    clamped: bool = False
    """The activation is gpt-oss's clamped SwiGLU, else SiLU."""
    limit: float = 0.0
    alpha: float = 0.0


class Experts(Protocol):
    """The experts of one implementation. A row's result depends on the row alone (law L14)."""

    reads_packed: bool
    """Whether it multiplies with quantized weights as they are stored."""

    def route(
        self, logits: Tensor, choice_bias: Tensor | None, spec: RouterSpec, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Each token's experts ``[tokens, top_k]``, and their weights in ``dtype``.

        ``logits`` and ``choice_bias``: fp32 ``[tokens, experts]`` and ``[experts]``.
        """

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, w: ExpertProducts) -> Tensor:
        """This rank's part of the sum over each token's experts.

        ``x [tokens, hidden]``; ``chosen`` int64 ``[tokens, top_k]``, of all ranks' experts; ``weights
        [tokens, top_k]``. Returns ``[tokens, hidden]`` in x's dtype.
        """


class TorchExperts:
    """Tokens are sorted by expert, and each expert that has tokens computes them in one product.

    Each token sums its experts' outputs in the order of its choices, whatever else the batch holds.
    """

    reads_packed = False

    def route(
        self, logits: Tensor, choice_bias: Tensor | None, spec: RouterSpec, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if spec.score == "top_softmax":
            values, chosen = logits.topk(spec.top_k, dim=-1)
            return chosen, values.softmax(-1).to(dtype)
        scores = logits.sigmoid() if spec.score == "sigmoid" else logits.softmax(-1)
        choice = scores if choice_bias is None else scores + choice_bias
        if spec.num_groups > 1:
            groups = choice.view(-1, spec.num_groups, spec.num_experts // spec.num_groups)
            group_scores = groups.topk(2, dim=-1).values.sum(-1) if spec.group_by_two else groups.amax(-1)
            best = group_scores.topk(spec.top_groups, dim=-1).indices
            others = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
            hidden = others.unsqueeze(-1).expand_as(groups).reshape(choice.shape)
            choice = choice.masked_fill(hidden, -torch.inf if choice_bias is not None else 0.0)
        chosen = choice.topk(spec.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if spec.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, (weights * spec.scale).to(dtype)

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, w: ExpertProducts) -> Tensor:
        top_k = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        rows = x[order // top_k]
        outputs = torch.zeros_like(rows)
        counts = chosen.flatten().bincount(minlength=w.num_experts).tolist()
        start = sum(counts[: w.first])
        for expert, count in enumerate(counts[w.first : w.first + len(w.gate_up)]):
            if count:
                outputs[start : start + count] = self._expert(rows[start : start + count], expert, w)
                start += count
        by_token = torch.empty_like(outputs)
        by_token[order] = outputs
        return (by_token.view(-1, top_k, x.shape[-1]) * weights[..., None]).sum(1).to(x.dtype)

    def _expert(self, x: Tensor, expert: int, w: ExpertProducts) -> Tensor:
        both = linear(x, as_tensor(w.gate_up)[expert], None if w.gate_up_bias is None else w.gate_up_bias[expert])
        gate, up = both.chunk(2, dim=-1)
        if w.clamped:
            gate, up = gate.clamp(max=w.limit), up.clamp(-w.limit, w.limit)
            hidden = (up + 1) * gate * torch.sigmoid(gate * w.alpha)
        else:
            hidden = silu(gate) * up
        return linear(hidden, as_tensor(w.down)[expert], None if w.down_bias is None else w.down_bias[expert])
