"""KV in eight bits: e4m3 (arXiv:2209.05433), saturating, with a factor for each layer's keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def to_fp8(x: Tensor, scale: float) -> Tensor:
    """``x / scale`` rounded to the nearest e4m3, ties to even; what is too large becomes the largest."""
    return (x.float() * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def stored(pages: Tensor) -> Tensor:
    """KV as kernels and copies see it: fp8 as bytes, because few operations know that type."""
    return pages.view(torch.uint8) if pages.dtype is FP8 else pages


def read(kept: Tensor, pages: Tensor, dtype: torch.dtype) -> Tensor:
    """A part of ``stored(pages)`` as values in ``dtype``, before their scale."""
    return kept.view(FP8).to(dtype) if pages.dtype is FP8 else kept
