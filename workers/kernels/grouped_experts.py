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


@dataclass(frozen=True, slots=True)
class ExpertProducts:
    """One layer's experts on this rank: ``experts`` of them, from number ``first`` on."""

    gate_up: Tensor
    """``[experts, 2 * size, hidden]``"""
    gate_up_bias: Tensor | None
    down: Tensor
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

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, w: ExpertProducts) -> Tensor:
        """This rank's part of the sum over each token's experts.

        ``x [tokens, hidden]``; ``chosen`` int64 ``[tokens, top_k]``, of all ranks' experts; ``weights
        [tokens, top_k]``. Returns ``[tokens, hidden]`` in x's dtype.
        """


class TorchExperts:
    """Tokens are sorted by expert, and each expert that has tokens computes them in one product.

    Each token sums its experts' outputs in the order of its choices, whatever else the batch holds.
    """

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
        both = linear(x, w.gate_up[expert], None if w.gate_up_bias is None else w.gate_up_bias[expert])
        gate, up = both.chunk(2, dim=-1)
        if w.clamped:
            gate, up = gate.clamp(max=w.limit), up.clamp(-w.limit, w.limit)
            hidden = (up + 1) * gate * torch.sigmoid(gate * w.alpha)
        else:
            hidden = silu(gate) * up
        return linear(hidden, w.down[expert], None if w.down_bias is None else w.down_bias[expert])
