"""The matrix products of a layer.

``Products`` is what the models call. ``TorchProducts`` is torch's own, on every device: the fastest there is, which may
choose another order of summation for a batch of another size. ``TritonProducts`` and ``CpuProducts`` sum every row in
one order (law L14).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from workers.kernels.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class PanelWeight:
    """Matrices as a CPU's products read them (``cpu/products.h``)."""

    data: Tensor
    """uint8 ``[matrices, bytes]``"""
    rows: int
    depth: int
    dtype: torch.dtype
    """float32, bfloat16 or int8"""
    scales: Tensor | None = None
    """Of int8: fp32 ``[matrices, rows]``"""

    def __len__(self) -> int:
        return len(self.data)


Weight: TypeAlias = Tensor | PanelWeight | PackedWeight
"""A matrix ``[n, k]``, or several, as its products want it."""


class Products(Protocol):
    """The products of one implementation."""

    reads_packed: bool
    """Whether ``linear`` multiplies with weights in FP8 blocks as they are stored."""

    def prepare(self, weight: Tensor, *, layer: bool = True) -> Weight:
        """``weight [n, k]``, or several, as the products want it. ``layer``: it is a layer's, and may be quantized."""

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: ``x [tokens, k]`` in rows of any stride, ``weight [n, k]``, ``bias [n]``."""

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """``linear`` in fp32, for the vocabulary."""

    def scores(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        """``linear`` in fp32, of a few rows: which experts are chosen hangs on little."""

    def by_head(self, x: Tensor, weight: Weight) -> Tensor:
        """Each head's ``x @ weight.T``: ``x [tokens, heads, k]``, ``weight [heads, n, k]``, both of any strides."""


class TorchProducts:
    """The reference."""

    reads_packed = False

    def prepare(self, weight: Tensor, *, layer: bool = True) -> Weight:
        return weight

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, as_tensor(weight), bias)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        return self.linear(x, weight).float()

    def scores(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return self.linear(x.float(), as_tensor(weight).float(), None if bias is None else bias.float())

    def by_head(self, x: Tensor, weight: Weight) -> Tensor:
        return torch.einsum("thk,hnk->thn", x, as_tensor(weight))


def as_tensor(weight: Weight) -> Tensor:
    """A weight that was prepared by torch's products."""
    assert isinstance(weight, Tensor)
    return weight
