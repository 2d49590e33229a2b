"""Root mean square normalization (arXiv:1910.07467)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension. An fp32 weight on half-precision ``x`` is applied in fp32 (Gemma)."""
    if weight.dtype != x.dtype:
        return torch_rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
    return torch_rms_norm(x, x.shape[-1:], weight, eps)
