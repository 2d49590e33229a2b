"""Small arrays on their way from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values`` on the device. The host does not wait: it copies from pinned memory, in the stream's order."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
