"""Memory between the host and a device. The host waits for neither direction until it needs the values."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload_parts(parts: Sequence[array[Any]], device: torch.device) -> list[Tensor]:
    """Arrays of 32-bit integers (``i``) and floats (``f``) on the device, in one copy: int32 and fp32 tensors.

    The host does not wait: it copies from pinned memory, in the stream's order.
    """
    data = b"".join(parts)
    whole = torch.frombuffer(bytearray(data), dtype=torch.int32) if data else torch.empty(0, dtype=torch.int32)
    if device.type != "cpu":
        whole = whole.pin_memory().to(device, non_blocking=True)
    tensors = whole.split_with_sizes([len(part) for part in parts])
    return [t if part.typecode == "i" else t.view(torch.float32) for t, part in zip(tensors, parts, strict=True)]


def upload_bytes(data: bytes | memoryview, device: torch.device) -> Tensor:
    """Bytes on a GPU, uint8 ``[len(data)]``. The host does not wait, and ``data`` may be reused at once."""
    pinned = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
    pinned.numpy()[:] = np.frombuffer(data, np.uint8)
    return pinned.to(device, non_blocking=True)


class Download:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._copied = tensor, None
        if not tensor.is_cpu:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> Tensor:
        """The values, once all that was queued before them is done."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


class SideStream:
    """What is read from a GPU beside its steps: they do not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def read(self, gather: Callable[[], Tensor]) -> Tensor:
        """What ``gather`` returns, on the host. It sees all that was queued for the steps, which may go on meanwhile.

        The calling thread waits.
        """
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            download = Download(gather())
        return download.wait()
