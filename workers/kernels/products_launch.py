"""Launches the Triton kernel of matrix products."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from workers.kernels.packed import FP8Weight
from workers.kernels.packed_launch import as_stored
from workers.kernels.products import TorchProducts, Weight, as_tensor
from workers.kernels.triton_products import product_kernel

MIN_COLUMN_TILES = 96
"""A product of few rows is as fast as its weights are read, which takes most of a GPU's multiprocessors."""


@dataclass(frozen=True, slots=True)
class ProductBlocks:
    """The tile of one weight: never by the batch, or a row's bits would depend on it."""

    columns: int
    rows: int = 64
    depth: int = 64
    num_warps: int = 4
    num_stages: int = 3


def blocks_of(num_columns: int) -> ProductBlocks:
    """The widest tile that leaves enough of them; 32 columns for small weights."""
    for columns in (128, 64):
        if num_columns >= columns * MIN_COLUMN_TILES:
            return ProductBlocks(columns)
    return ProductBlocks(32)


class TritonProducts(TorchProducts):
    """``Products`` on a GPU."""

    reads_packed = True

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        rows = x if x.stride(-1) == 1 else x.contiguous()
        heads = weight if isinstance(weight, FP8Weight) else as_tensor(weight).unsqueeze(0)
        out = x.new_empty(len(rows), heads.values.shape[1] if isinstance(heads, FP8Weight) else heads.shape[1])
        _launch(out.unsqueeze(1), rows.unsqueeze(1), heads, bias)
        return out

    def by_head(self, x: Tensor, weight: Weight) -> Tensor:
        rows, weight = x if x.stride(-1) == 1 else x.contiguous(), as_tensor(weight)
        out = x.new_empty(x.shape[0], x.shape[1], weight.shape[1])
        _launch(out, rows, weight, None)
        return out


def _launch(out: Tensor, x: Tensor, weight: Weight, bias: Tensor | None) -> None:
    """``out [rows, heads, n]``, ``x [rows, heads, k]``, ``weight [heads, n, k]``, of one head if it is packed."""
    stored, scales, form = as_stored(weight)
    heads, n, k = stored.shape
    blocks = blocks_of(n)
    if not len(x):
        return
    product_kernel[triton.cdiv(len(x), blocks.rows), triton.cdiv(n, blocks.columns), heads](
        out, x, stored, scales, out if bias is None else bias, len(x), out.stride(0), out.stride(1), x.stride(0),
        x.stride(1), *stored.stride(), **form, N=n, K=k, BLOCK_M=blocks.rows, BLOCK_N=blocks.columns,
        BLOCK_K=blocks.depth, BIAS=bias is not None, num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        enable_fp_fusion=False,
    )  # fmt: skip
