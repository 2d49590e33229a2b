"""Memory for weights and KV, in the kernel's huge pages where it has them.

A step reads all weights, and in pages of 4 KB every 64 loads of a vector need another translation: with eight rows the
products of a model that no cache holds take a sixth longer. And when a process dies, its pages are freed before its
connections are closed, by which others notice: in pages of 4 KB that takes 0.06 s a GB longer. See ``madvise(2)``,
MADV_HUGEPAGE.
"""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import torch
from torch import Tensor

CHUNK = 32 * 1024 * 1024
"""What is smaller shares a mapping: a huge page has 2 MB."""
ALIGNMENT = 64


class HugePages:
    """Hands out zeroed memory, which is freed when the tensors of a mapping are gone."""

    def __init__(self) -> None:
        self._mapping, self._used = mmap.mmap(-1, mmap.PAGESIZE), mmap.PAGESIZE

    def empty(self, *shape: int) -> Tensor:
        """Bytes, uint8 of that shape."""
        size = prod(shape)
        if self._used + size > len(self._mapping):
            self._mapping, self._used = _mapping(max(size, CHUNK)), 0
        first, self._used = self._used, self._used + (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=first).view(shape)


def _mapping(size: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # this kernel has none
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
