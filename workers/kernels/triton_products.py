"""Matrix products in Triton whose rows do not depend on the batch: see ``products``.

A program computes a tile of rows and columns, over all of ``k`` in blocks of ``BLOCK_K``, in order. The tile follows
from the weight's shape alone, and the number of rows is never compiled in, so that one binary sums every row alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workers.kernels.triton_packed import PLAIN, read_tile


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    out,
    x,
    weight,
    scales,
    bias,
    num_rows,
    out_row_stride,
    out_head_stride,
    x_row_stride,
    x_head_stride,
    w_head_stride,
    w_n_stride,
    w_k_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_DEPTH: tl.constexpr,
):
    """Program (tile, head): neighbours are tiles of ``BAND`` rows of tiles, which a cache holds with their columns."""
    tile, head = tl.program_id(0), tl.program_id(1)
    column_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    band = tile // (BAND * column_tiles) * BAND
    height = tl.minimum(BAND, tl.cdiv(num_rows, BLOCK_M) - band)
    in_band = tile % (BAND * column_tiles)
    row = (band + in_band % height).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = in_band // height * BLOCK_N + tl.arange(0, BLOCK_N)
    there, inside = row < num_rows, column < N
    x += head * x_head_stride
    weight += head.to(tl.int64) * w_head_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        i = k + tl.arange(0, BLOCK_K)
        in_rows, in_columns = there[:, None], inside[None, :]
        if K % BLOCK_K:
            in_rows, in_columns = in_rows & (i < K)[None, :], in_columns & (i < K)[:, None]
        rows = tl.load(x + row[:, None] * x_row_stride + i[None, :], mask=in_rows, other=0.0)
        if FORMAT == PLAIN:
            at = column.to(tl.int64)[None, :] * w_n_stride + i[:, None] * w_k_stride
            columns = tl.load(weight + at, mask=in_columns, other=0.0)
        else:
            columns = read_tile(
                weight, scales, column.to(tl.int64), column // SCALE_ROWS, inside, k, rows,
                K, BLOCK_K, FORMAT, SCALE_DEPTH,
            )  # fmt: skip
        total = tl.dot(rows, columns, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = out + row[:, None] * out_row_stride + head * out_head_stride + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])
