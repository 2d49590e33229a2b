"""How the Triton kernels receive weights, packed and plain."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.kernels.packed import GROUP, FP8Weight, MXFP4Planes
from workers.kernels.products import Weight, as_tensor
from workers.kernels.triton_packed import FP8, MXFP4, MXFP4_PAIRS, PLAIN


def format_of(weight: Weight) -> dict[str, int]:
    """How a weight is stored, as the kernels' constants."""
    if isinstance(weight, MXFP4Planes):
        pairs = weight.words.device.type == "cuda" and torch.version.hip is None
        return {"FORMAT": (MXFP4_PAIRS if pairs else MXFP4).value, "SCALE_ROWS": 1, "SCALE_DEPTH": GROUP}
    if isinstance(weight, FP8Weight):
        return {"FORMAT": FP8.value, "SCALE_ROWS": weight.block[0], "SCALE_DEPTH": weight.block[1]}
    return {"FORMAT": PLAIN.value, "SCALE_ROWS": 1, "SCALE_DEPTH": 1}


def depth_of(weight: Weight) -> int:
    """The columns of a weight."""
    return weight.depth if isinstance(weight, MXFP4Planes | FP8Weight) else as_tensor(weight).shape[-1]


def as_stored(weight: Weight) -> tuple[Tensor, Tensor, dict[str, int]]:
    """A weight's bytes, its scales and its format. A plain one stands for the scales that it does not have."""
    if isinstance(weight, MXFP4Planes):
        return weight.words, weight.scales, format_of(weight)
    if isinstance(weight, FP8Weight):
        return weight.values.view(torch.uint8), weight.scales, format_of(weight)
    plain = as_tensor(weight)
    return plain, plain, format_of(plain)
