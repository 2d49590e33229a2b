"""Tiles of weights in Triton, in the formats that ``packed`` defines."""

from __future__ import annotations

import triton
import triton.language as tl

from workers.kernels.triton_fp8 import as_read

PLAIN, FP8, MXFP4, MXFP4_PAIRS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""How a weight is stored: as it is, or packed. ``MXFP4_PAIRS``: converted by NVIDIA's instructions."""


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


_IN_PAIRS = """{{
.reg .b32 bits, part, zero;
mov.b32 zero, 0x80008000;
{}
fma.rn.bf16x2 $0, bits, $2, zero;
}}"""
_SHIFTED = "shl.b32 bits, $1, {}; and.b32 bits, bits, 0x81C081C0;"
_LAST = """shl.b32 bits, $1, 1; and.b32 bits, bits, 0x80008000;
shr.b32 part, $1, 5; and.b32 part, part, 0x01000100; or.b32 bits, bits, part;
shr.b32 part, $1, 4; and.b32 part, part, 0x00C000C0; or.b32 bits, bits, part;"""
FIRST_PAIR, SECOND_PAIR, THIRD_PAIR, LAST_PAIR = (
    tl.constexpr(_IN_PAIRS.format(each)) for each in (*(_SHIFTED.format(shift) for shift in (0, 3, 6)), _LAST)
)
"""``plane_of`` in PTX, two words at a time: by themselves, compilers take one, and a product waits for its weights."""


@triton.jit
def _in_pairs(words, factor, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [words, factor], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def plane_of(words, scales, like, NUMBER: tl.constexpr, FORMAT: tl.constexpr):
    """Plane ``NUMBER`` of a chunk's words ``[values, rows]``, in the type of ``like``. ``scales``: the chunk's."""
    exponents = (scales >> (8 * NUMBER)) & 0xFF
    if FORMAT == MXFP4_PAIRS and like.dtype == tl.bfloat16:
        factor = ((exponents + 126) << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)[None, :]
        if NUMBER == 0:
            return _in_pairs(words, factor, FIRST_PAIR)
        elif NUMBER == 1:
            return _in_pairs(words, factor, SECOND_PAIR)
        elif NUMBER == 2:
            return _in_pairs(words, factor, THIRD_PAIR)
        else:
            return _in_pairs(words, factor, LAST_PAIR)
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
def load_words(words, row, inside, chunk, NUM_ROWS: tl.constexpr):
    """A chunk's words of rows of a weight ``[values, rows]``."""
    at = (chunk * NUM_ROWS + row)[None, :] * 32 + tl.arange(0, 32)[:, None]
    return tl.load(words + at, mask=inside[None, :], other=0).to(tl.uint16, bitcast=True)


@triton.jit
def load_scales(scales, inside, chunk, NUM_ROWS: tl.constexpr):
    """The scales of a chunk's planes, four in a word. ``scales``: points to the rows."""
    return tl.load(scales + chunk * NUM_ROWS, mask=inside, other=0)
