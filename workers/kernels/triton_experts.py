"""The products of a mixture of experts in Triton: see ``grouped_experts``.

The rows, a token and one of its choices, are sorted by expert, and each expert's are cut into blocks of ``BLOCK_M``.
A program computes one block of rows with one block of columns; programs without rows end at once, so that the grid
follows from the number of tokens alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
):
    """Program (block of rows, block of columns): ``activation(gate) * up``, in the sorted order."""
    expert, place, there, row = _block_rows(blocks, ends, order, tl.program_id(0), BLOCK_M)
    if expert >= 0:
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < SIZE
        first = weight + expert.to(tl.int64) * 2 * SIZE * HIDDEN
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, HIDDEN, BLOCK_K):
            i = k + tl.arange(0, BLOCK_K)
            rows = tl.load(
                x + (row // TOP_K)[:, None] * HIDDEN + i[None, :],
                mask=there[:, None] & (i < HIDDEN)[None, :],
                other=0.0,
            )
            mask = (i < HIDDEN)[:, None] & inside[None, :]
            at = column[None, :] * HIDDEN + i[:, None]
            gates = tl.load(first + at, mask=mask, other=0.0)
            ups = tl.load(first + SIZE * HIDDEN + at, mask=mask, other=0.0)
            gate += tl.dot(rows, gates.to(rows.dtype), input_precision="ieee")
            up += tl.dot(rows, ups.to(rows.dtype), input_precision="ieee")
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
):
    """Program (block of rows, block of columns): an expert's output times its share, in the tokens' order."""
    expert, place, there, row = _block_rows(blocks, ends, order, tl.program_id(0), BLOCK_M)
    if expert >= 0:
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = column < HIDDEN
        first = weight + expert.to(tl.int64) * HIDDEN * SIZE
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, SIZE, BLOCK_K):
            i = k + tl.arange(0, BLOCK_K)
            rows = tl.load(
                hidden + place.to(tl.int64)[:, None] * SIZE + i[None, :],
                mask=there[:, None] & (i < SIZE)[None, :],
                other=0.0,
            )
            weights = tl.load(
                first + column[None, :] * SIZE + i[:, None], mask=(i < SIZE)[:, None] & inside[None, :], other=0.0
            )
            total += tl.dot(rows, weights.to(rows.dtype), input_precision="ieee")
        if BIAS:
            total += tl.load(bias + expert * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        total = total * tl.load(share + row, mask=there, other=0.0).to(tl.float32)[:, None]
        to = row.to(tl.int64)[:, None] * HIDDEN + column[None, :]
        tl.store(out + to, total.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])
