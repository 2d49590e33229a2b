"""Quantized weights of checkpoints, as they are stored, and what they stand for.

The experts' kernels of a GPU read them so: half or a quarter of the bytes. What they multiply with is, bit for bit,
what ``dequantized`` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1; the highest of the four bits is the sign."""
E8M0_BIAS = 127
GROUP = 32
"""Values of MXFP4 that have one scale."""
PLANES = 4
CHUNK = PLANES * GROUP


@dataclass(frozen=True, slots=True)
class MXFP4Weight:
    """``[matrices, rows, depth]`` in MXFP4, along the depth."""

    blocks: Tensor
    """uint8 ``[matrices, rows, groups, GROUP / 2]``"""
    scales: Tensor
    """uint8 ``[matrices, rows, groups]``"""
    depth: int

    def __len__(self) -> int:
        return len(self.blocks)

    def part(self, matrices: slice, rows: slice, columns: slice) -> MXFP4Weight | None:
        """Some of it, without a copy; None if the columns cut a group."""
        first, end, _ = columns.indices(self.depth)
        if first % GROUP or (end % GROUP and end != self.depth):
            return None
        groups = slice(first // GROUP, -(-end // GROUP))
        return MXFP4Weight(self.blocks[matrices, rows, groups], self.scales[matrices, rows, groups], end - first)

    def planes(self, device: torch.device) -> MXFP4Planes | None:
        """As a GPU's kernels read it; None if a scale is above 2, which they do not multiply with."""
        if self.scales.max() > E8M0_BIAS + 1:
            return None
        num_chunks = -(-self.depth // CHUNK)
        words = [_words(blocks.to(device), num_chunks) for blocks in self.blocks]
        scales = self.scales.to(device).transpose(1, 2)
        scales = torch.nn.functional.pad(scales, (0, 0, 0, num_chunks * PLANES - scales.shape[1]))
        first, second, third, last = scales.int().unflatten(1, (num_chunks, PLANES)).unbind(2)
        together = first | second << 8 | third << 16 | last << 24
        return MXFP4Planes(torch.stack(words), together.contiguous(), self.depth)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        # One matrix at a time: together, in fp32, they are eight times as large as stored.
        parts = [from_mxfp4(*pair).to(dtype) for pair in zip(self.blocks, self.scales, strict=True)]
        return torch.stack(parts)[..., : self.depth].contiguous()


@dataclass(frozen=True, slots=True)
class MXFP4Planes:
    """``[matrices, rows, depth]`` in MXFP4, in chunks of four planes of 32 values, which have one scale each.

    A word has a code of each plane: the bits of a code are where bf16 has them, or where one shift and a mask take
    them there. (Triton's own kernels have bits in such an order too: triton_kernels, tensor_details.)
    """

    words: Tensor
    """int16 ``[matrices, chunks, rows, GROUP]``: what a program reads at a time lies together."""
    scales: Tensor
    """int32 ``[matrices, chunks, rows]``, those of the planes together, the first in the low bits.

    Of bytes, Triton would have tensor cores multiply in another order of the depth, with tiles of few rows alone.
    """
    depth: int

    def __len__(self) -> int:
        return len(self.words)


def _words(blocks: Tensor, num_chunks: int) -> Tensor:
    """``blocks`` uint8 ``[rows, groups, GROUP / 2]`` as words int16 ``[chunks, rows, GROUP]``."""
    codes = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).view(len(blocks), -1, GROUP).int()
    codes = torch.nn.functional.pad(codes, (0, 0, 0, num_chunks * PLANES - codes.shape[1]))
    first, second, third, last = codes.view(len(blocks), num_chunks, PLANES, GROUP).unbind(2)
    words = _bits(first) | _bits(second) >> 3 | _bits(third) >> 6
    words |= (last & 8) << 11 | (last & 4) << 11 | (last & 3) << 10
    return words.to(torch.int16).transpose(0, 1).contiguous()


def _bits(codes: Tensor) -> Tensor:
    """Sign and magnitude of E2M1 where bf16 has its sign and the middle of exponent and mantissa."""
    return (codes & 8) << 12 | (codes & 7) << 6


@dataclass(frozen=True, slots=True)
class FP8Weight:
    """``[matrices, rows, depth]`` in E4M3, with a scale for each block of rows and depth."""

    values: Tensor
    """E4M3 ``[matrices, rows, depth]``"""
    scales: Tensor
    """fp32 ``[matrices, blocks of rows, blocks of depth]``"""
    block: tuple[int, int]

    @property
    def depth(self) -> int:
        return self.values.shape[-1]

    def __len__(self) -> int:
        return len(self.values)

    def part(self, matrices: slice, rows: slice, columns: slice) -> FP8Weight | None:
        """Some of it, without a copy; None if that cuts a block."""
        at = []
        for each, size, block in zip((rows, columns), self.values.shape[1:], self.block, strict=True):
            first, end, _ = each.indices(size)
            if first % block or (end % block and end != size):
                return None
            at.append(slice(first // block, -(-end // block)))
        return replace(self, values=self.values[matrices, rows, columns], scales=self.scales[(matrices, *at)])

    def to(self, device: torch.device) -> FP8Weight:
        return replace(
            self, values=self.values.contiguous().to(device), scales=self.scales.float().contiguous().to(device)
        )

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        pairs = zip(self.values, self.scales, strict=True)
        return torch.stack([from_fp8_blocks(*pair, self.block).to(dtype) for pair in pairs])


PackedWeight: TypeAlias = MXFP4Planes | FP8Weight
"""As the kernels of a GPU read it."""
Stored = TypeVar("Stored", MXFP4Weight, FP8Weight)
"""As a checkpoint has it."""


def concatenated(weights: Sequence[Stored], dim: int) -> Stored | None:
    """Weights of one format after one another: matrices (0) or rows (1). None if rows end within a block of rows."""
    first = weights[0]
    if isinstance(first, MXFP4Weight):
        of_mxfp4 = [weight for weight in weights if isinstance(weight, MXFP4Weight)]
        blocks, scales = (torch.cat([getattr(w, name) for w in of_mxfp4], dim) for name in ("blocks", "scales"))
        return replace(first, blocks=blocks, scales=scales)
    of_fp8 = [weight for weight in weights if isinstance(weight, FP8Weight)]
    if dim == 1 and any(weight.values.shape[1] % first.block[0] for weight in of_fp8[:-1]):
        return None
    values = torch.cat([weight.values.view(torch.uint8) for weight in of_fp8], dim)
    return replace(
        first, values=values.view(torch.float8_e4m3fn), scales=torch.cat([weight.scales for weight in of_fp8], dim)
    )


def from_fp8_blocks(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """``weight [rows, columns]`` in E4M3, times its block's of ``scales`` (DeepSeek-V3, arXiv:2412.19437, 3.3)."""
    rows, columns = weight.shape
    whole = scales.float().repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)
    return weight.float() * whole[:rows, :columns]


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """``blocks [..., groups, bytes]``, two E2M1 values a byte, low half first, as ``[..., groups * bytes * 2]``.

    Each group has one power of two of ``scales [..., groups]`` (OCP Microscaling Formats 1.0).
    """
    values = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)))
    halves = torch.stack((values[(blocks & 0xF).long()], values[(blocks >> 4).long()]), dim=-1)
    scaled = torch.ldexp(halves.flatten(-2), scales.int()[..., None] - E8M0_BIAS)
    return scaled.flatten(-2)
