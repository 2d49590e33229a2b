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
    """Columns ``k`` to ``k + BLOCK_K`` of rows of a weight, one row after another, in the type of ``like``.

    Of a plain weight, or one in FP8 blocks.
    """
    i = k + tl.arange(0, BLOCK_K)
    mask = (i < DEPTH)[:, None] & inside[None, :]
    if FORMAT == FP8:
        codes = tl.load(weight + row[None, :] * DEPTH + i[:, None], mask=mask, other=0)
        groups: tl.constexpr = (DEPTH + SCALE_DEPTH - 1) // SCALE_DEPTH
        scale = tl.load(scales + scale_row[None, :] * groups + (i // SCALE_DEPTH)[:, None], mask=mask, other=0.0)
        return (as_read(codes, scale) * scale).to(like.dtype)
    else:
        return tl.load(weight + row[None, :] * DEPTH + i[:, None], mask=mask, other=0.0).to(like.dtype)


@triton.jit
def plane_of(words, pair, like, NUMBER: tl.constexpr):
    """Plane ``NUMBER`` of a chunk's words ``[values, rows]``, in the type of ``like``. ``pair``: its pair of scales."""
    exponents = (pair >> (8 * (NUMBER % 2))) & 0xFF
    bits = (words << (3 * NUMBER)) & 0x81C0
    if NUMBER == 3:
        bits = ((words << 1) & 0x8000) | ((words >> 5) & 0x100) | ((words >> 4) & 0xC0)
    if like.dtype == tl.bfloat16:
        # E2M1's exponent has a bias of 1, and a scale's and bf16's one of 127: as bf16 a code is 2**126 too small.
        factor = ((exponents + 126) << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True) * factor[None, :]
    else:
        # In fp16, whose exponent has a bias of 15.
        wide = ((bits & 0x8000) | ((bits & 0x1C0) << 3)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        exponent = exponents.to(tl.uint32)
        power = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
        return (wide * 16384.0 * power[None, :]).to(like.dtype)


@triton.jit
def load_words(words, row, inside, chunk, NUM_CHUNKS: tl.constexpr):
    """A chunk's words of rows of a weight ``[values, rows]``."""
    at = row[None, :] * (NUM_CHUNKS * 32) + (chunk * 32 + tl.arange(0, 32))[:, None]
    return tl.load(words + at, mask=inside[None, :], other=0).to(tl.uint16, bitcast=True)


@triton.jit
def load_pair(pairs, inside, chunk, plane: tl.constexpr, NUM_ROWS: tl.constexpr):
    """The scales of a plane of a chunk and of its neighbour. ``pairs``: points to the rows."""
    at = pairs + (chunk * 2 + plane // 2) * NUM_ROWS
    return tl.load(at, mask=inside, other=0).to(tl.uint16, bitcast=True)
