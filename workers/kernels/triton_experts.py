"""The products of a mixture of experts in Triton: see ``grouped_experts``.

The rows, a token and one of its choices, are sorted by expert, and each expert's are cut into blocks of ``BLOCK_M``.
A program computes one block of rows with one block of columns; programs without rows end at once, so that the grid
follows from the number of tokens alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workers.kernels.triton_packed import MXFP4, load_scales, load_words, plane_of, read_tile


@triton.jit
def _block_rows(blocks, ends, order, block, BLOCK_M: tl.constexpr):
    """A block's expert (-1: none), its places among the sorted rows, which of them there are, and the rows."""
    expert = tl.load(blocks + 2 * block)
    place = tl.load(blocks + 2 * block + 1) + tl.arange(0, BLOCK_M)
    there = place < tl.where(expert >= 0, tl.load(ends + tl.maximum(expert, 0)), 0)
    return expert, place, there, tl.load(order + place, mask=there, other=0)


@triton.jit
def expert_gate_kernel(
    out,
    x,
    weight,
    scales,
    bias,
    order,
    blocks,
    ends,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_DEPTH: tl.constexpr,
):
    """Program (block of rows, block of columns): ``activation(gate) * up``, in the sorted order."""
    expert, place, there, row = _block_rows(blocks, ends, order, tl.program_id(0), BLOCK_M)
    if expert >= 0:
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < SIZE
        rows_before = expert.to(tl.int64) * 2 * SIZE
        scales_before = expert.to(tl.int64) * ((2 * SIZE + SCALE_ROWS - 1) // SCALE_ROWS)
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        from_x = x + (row // TOP_K)[:, None] * HIDDEN
        if FORMAT >= MXFP4:
            chunks: tl.constexpr = (HIDDEN + 127) // 128
            from_words = weight + rows_before * chunks * 32
            from_scales = scales + rows_before * chunks + column
            for chunk in range(0, chunks):
                gate_words = load_words(from_words, column, inside, chunk, 2 * SIZE)
                up_words = load_words(from_words, SIZE + column, inside, chunk, 2 * SIZE)
                gate_scales = load_scales(from_scales, inside, chunk, 2 * SIZE)
                up_scales = load_scales(from_scales + SIZE, inside, chunk, 2 * SIZE)
                for plane in tl.static_range(4):
                    i = chunk * 128 + plane * 32 + tl.arange(0, 32)
                    rows = tl.load(from_x + i[None, :], mask=there[:, None] & (i < HIDDEN)[None, :], other=0.0)
                    gates = plane_of(gate_words, gate_scales, rows, plane, FORMAT)
                    gate = tl.dot(rows, gates, gate, input_precision="ieee")
                    ups = plane_of(up_words, up_scales, rows, plane, FORMAT)
                    up = tl.dot(rows, ups, up, input_precision="ieee")
        else:
            for k in range(0, HIDDEN, BLOCK_K):
                i = k + tl.arange(0, BLOCK_K)
                rows = tl.load(from_x + i[None, :], mask=there[:, None] & (i < HIDDEN)[None, :], other=0.0)
                gates = read_tile(
                    weight, scales, rows_before + column, scales_before + column // SCALE_ROWS, inside, k, rows,
                    HIDDEN, BLOCK_K, FORMAT, SCALE_DEPTH,
                )  # fmt: skip
                gate = tl.dot(rows, gates, gate, input_precision="ieee")
                ups = read_tile(
                    weight, scales, rows_before + SIZE + column, scales_before + (SIZE + column) // SCALE_ROWS, inside,
                    k, rows, HIDDEN, BLOCK_K, FORMAT, SCALE_DEPTH,
                )  # fmt: skip
                up = tl.dot(rows, ups, up, input_precision="ieee")
        if BIAS:
            gate += tl.load(bias + expert * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + expert * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        z = gate
        if CLAMPED:
            gate = tl.minimum(gate, limit)
            up = 1.0 + tl.minimum(tl.maximum(up, -limit), limit)
            z = gate * alpha
        small = tl.exp(-tl.abs(z))  # of z or of -z, whichever does not overflow
        active = gate * tl.where(z >= 0.0, 1.0, small) / (1.0 + small) * up
        to = place.to(tl.int64)[:, None] * SIZE + column[None, :]
        tl.store(out + to, active.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def expert_down_kernel(
    out,
    hidden,
    weight,
    scales,
    bias,
    share,
    order,
    blocks,
    ends,
    HIDDEN: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_DEPTH: tl.constexpr,
):
    """Program (block of rows, block of columns): an expert's output times its share, in the tokens' order."""
    expert, place, there, row = _block_rows(blocks, ends, order, tl.program_id(0), BLOCK_M)
    if expert >= 0:
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < HIDDEN
        row_of_column = expert.to(tl.int64) * HIDDEN + column
        scales_before = expert.to(tl.int64) * ((HIDDEN + SCALE_ROWS - 1) // SCALE_ROWS)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        from_hidden = hidden + place.to(tl.int64)[:, None] * SIZE
        if FORMAT >= MXFP4:
            chunks: tl.constexpr = (SIZE + 127) // 128
            from_words = weight + expert.to(tl.int64) * HIDDEN * chunks * 32
            from_scales = scales + expert.to(tl.int64) * HIDDEN * chunks + column
            for chunk in range(0, chunks):
                words = load_words(from_words, column, inside, chunk, HIDDEN)
                of_planes = load_scales(from_scales, inside, chunk, HIDDEN)
                for plane in tl.static_range(4):
                    i = chunk * 128 + plane * 32 + tl.arange(0, 32)
                    rows = tl.load(from_hidden + i[None, :], mask=there[:, None] & (i < SIZE)[None, :], other=0.0)
                    weights = plane_of(words, of_planes, rows, plane, FORMAT)
                    total = tl.dot(rows, weights, total, input_precision="ieee")
        else:
            for k in range(0, SIZE, BLOCK_K):
                i = k + tl.arange(0, BLOCK_K)
                rows = tl.load(from_hidden + i[None, :], mask=there[:, None] & (i < SIZE)[None, :], other=0.0)
                weights = read_tile(
                    weight, scales, row_of_column, scales_before + column // SCALE_ROWS, inside, k, rows,
                    SIZE, BLOCK_K, FORMAT, SCALE_DEPTH,
                )  # fmt: skip
                total = tl.dot(rows, weights, total, input_precision="ieee")
        if BIAS:
            total += tl.load(bias + expert * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        total = total * tl.load(share + row, mask=there, other=0.0).to(tl.float32)[:, None]
        to = row.to(tl.int64)[:, None] * HIDDEN + column[None, :]
        tl.store(out + to, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])
