"""Tiles of weights in Triton, in the formats that ``packed`` defines."""

from __future__ import annotations

import triton
import triton.language as tl

from workers.kernels.triton_fp8 import as_read

PLAIN, FP8, MXFP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""How a weight is stored: as it is, or packed."""


@triton.jit
def read_tile(
    weight,
    scales,
    row,
    scale_row,
    inside,
    k,
    like,
    DEPTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_DEPTH: tl.constexpr,
):
    """Columns ``k`` to ``k + BLOCK_K`` of rows of a weight, one row after another, in the type of ``like``."""
    i = k + tl.arange(0, BLOCK_K)
    mask = (i < DEPTH)[:, None] & inside[None, :]
    groups: tl.constexpr = (DEPTH + SCALE_DEPTH - 1) // SCALE_DEPTH
    at_scale = scale_row[None, :] * groups + (i // SCALE_DEPTH)[:, None]
    if FORMAT == MXFP4:
        byte = k // 2 + tl.arange(0, BLOCK_K // 2)
        row_bytes: tl.constexpr = groups * SCALE_DEPTH // 2
        there = inside[:, None] & (byte < row_bytes)[None, :]
        pairs = tl.load(weight + row[:, None] * row_bytes + byte[None, :], mask=there, other=0)
        codes = tl.trans(tl.interleave(pairs & 0xF, pairs >> 4)).to(tl.uint16)
        # E2M1 has a bias of 1, fp16 one of 15; where its exponent is 0, so is that of the fp16.
        bits = ((codes & 8) << 12) | ((codes & 7) << 9)
        values = bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
        exponent = tl.load(scales + at_scale, mask=mask, other=0).to(tl.uint32)
        power = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
        return tl.where(mask, values * power, 0.0).to(like.dtype)
    elif FORMAT == FP8:
        codes = tl.load(weight + row[None, :] * DEPTH + i[:, None], mask=mask, other=0)
        scale = tl.load(scales + at_scale, mask=mask, other=0.0)
        return (as_read(codes, scale) * scale).to(like.dtype)
    else:
        return tl.load(weight + row[None, :] * DEPTH + i[:, None], mask=mask, other=0.0).to(like.dtype)
