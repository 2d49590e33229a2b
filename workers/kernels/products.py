"""The matrix products of a layer.

``Products`` is what the models call. ``TorchProducts`` is torch's own, on every device: the fastest there is, which may
choose another order of summation for a batch of another size. ``TritonProducts`` sums every row in one order (law L14).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Products(Protocol):
    """The products of one implementation."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: ``x [tokens, k]`` in rows of any stride, ``weight [n, k]``, ``bias [n]``."""

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Each head's ``x @ weight.T``: ``x [tokens, heads, k]``, ``weight [heads, n, k]``, both of any strides."""


class TorchProducts:
    """The reference."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("thk,hnk->thn", x, weight)
