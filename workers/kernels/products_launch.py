"""Launches the Triton kernel of matrix products."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workers.kernels.packed import FP8Weight
from workers.kernels.packed_launch import as_stored
from workers.kernels.products import TorchProducts, Weight, as_tensor
from workers.kernels.tiles import BY_RULE, ProductShape, Tiles
from workers.kernels.triton_products import product_kernel

BAND = 8
"""Rows of tiles."""


class TritonProducts(TorchProducts):
    """``Products`` on a GPU."""

    reads_packed = True

    def __init__(self, tiles: Tiles = BY_RULE) -> None:
        self._tiles = tiles

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        rows = x if x.stride(-1) == 1 else x.contiguous()
        heads = weight if isinstance(weight, FP8Weight) else as_tensor(weight).unsqueeze(0)
        out = x.new_empty(len(rows), heads.values.shape[1] if isinstance(heads, FP8Weight) else heads.shape[1])
        self.multiply(out.unsqueeze(1), rows.unsqueeze(1), heads, bias)
        return out

    def scores(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        matrix = as_tensor(weight)
        if x.dtype is not matrix.dtype:
            return super().scores(x, weight, bias)
        # A product of two of 16 bits is exact in fp32, which tensor cores add up in.
        out = x.new_empty(len(x), len(matrix), dtype=torch.float32)
        self.multiply(out.unsqueeze(1), x.contiguous().unsqueeze(1), matrix.unsqueeze(0), bias)
        return out

    def by_head(self, x: Tensor, weight: Weight) -> Tensor:
        rows, weight = x if x.stride(-1) == 1 else x.contiguous(), as_tensor(weight)
        out = x.new_empty(x.shape[0], x.shape[1], weight.shape[1])
        self.multiply(out, rows, weight, None)
        return out

    def multiply(self, out: Tensor, x: Tensor, weight: Weight, bias: Tensor | None) -> None:
        """``out [rows, heads, n]``, ``x [rows, heads, k]``, ``weight [heads, n, k]``, of one head if it is packed."""
        stored, scales, form = as_stored(weight)
        heads, n, k = stored.shape
        if not len(x):
            return
        tile = self._tiles.product(ProductShape(n, k, x.dtype, isinstance(weight, FP8Weight)), len(x), x.device)
        product_kernel[triton.cdiv(len(x), tile.rows) * triton.cdiv(n, tile.columns), heads](
            out, x, stored, scales, out if bias is None else bias, len(x), out.stride(0), out.stride(1), x.stride(0),
            x.stride(1), *stored.stride(), **form, N=n, K=k, BLOCK_M=tile.rows, BLOCK_N=tile.columns,
            BLOCK_K=tile.depth, BAND=BAND, BIAS=bias is not None, num_warps=tile.num_warps, num_stages=tile.num_stages,
            enable_fp_fusion=False,
        )  # fmt: skip
