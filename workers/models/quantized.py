"""Quantized weights of checkpoints, as full-precision tensors."""

from __future__ import annotations

import torch
from torch import Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of E2M1; the highest of the four bits is the sign."""
E8M0_BIAS = 127


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
