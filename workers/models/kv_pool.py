"""The device's KV, by KV group and page."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.kernels.cpu.memory import HugePages
from workers.kernels.fp8 import FP8, stored
from workers.kernels.upload import SideStream, upload_bytes, upload_parts
from workers.models.spec import LatentSpec, Mixer, ModelConfig


class KVPool:
    """KV of all layers: K and V ``[num_pages + 1, kv_heads, page_size, head_dim]`` each.

    A latent layer has one tensor, ``[num_pages + 1, 1, page_size, latent_dim]``, and no V. ``num_pages`` is by
    KV group (``ModelConfig.kv_groups``). Heads come first, so that a head's positions are gathered as whole
    rows and are contiguous, which attention reads 1.4 to 1.8 times faster. Padding rows write to the page past
    the end, which is never read.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        """``scales``: of keys and values, by layer, for fp8."""
        self.page_size, self.dtype, self._device = page_size, dtype, device
        self.page_bytes = page_sizes_bytes(config, page_size, dtype)
        groups, memory = config.kv_groups, HugePages()
        self.k: list[Tensor] = []
        self.v: list[Tensor | None] = []
        for layer, group in zip(config.layers, config.layer_groups, strict=True):
            heads, dims = _shape(layer.mixer)
            rows = num_pages[groups.index(group)] + 1
            parts = [_zeros(memory, (rows, heads, page_size, dim), dtype, device) for dim in dims]
            self.k.append(parts[0])
            self.v.append(parts[1] if len(parts) > 1 else None)
        self.scales = [(1.0, 1.0)] * len(self.k) if dtype is not FP8 or not scales else list(scales)
        self._parts: list[list[Tensor]] = [[] for _ in groups]
        self._side: SideStream | None = None
        self._bytes: dict[int, list[tuple[npt.NDArray[np.uint8], int, int]]] = {}
        for part in (self.k, self.v):
            for tensor, group in zip(part, config.layer_groups, strict=True):
                if tensor is not None:
                    self._parts[groups.index(group)].append(stored(tensor))

    def take_in(self, other: KVPool, group: int) -> None:
        """Let the pages of ``group`` hold another model's KV too, which has as many in each of its groups.

        From now on they are copied, read and written together.
        """
        assert other.dtype == self.dtype and other.page_size == self.page_size
        self._parts[group] += [part for parts in other._parts for part in parts]
        self.page_bytes[group] += sum(other.page_bytes)
        self._bytes.clear()

    def copy_pages(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy whole pages ``(group, source, target)``, in order: a target may be a later source."""
        for group, source, target in copies:
            for pages in self._parts[group]:
                pages[target].copy_(pages[source])

    def zero_pages(self, group: int, pages: Sequence[int]) -> None:
        """Overwrite whole pages."""
        index = self._index(pages)
        for part in self._parts[group]:
            part.index_fill_(0, index, 0)

    def read_pages(self, group: int, pages: Sequence[int]) -> list[bytes]:
        """Each page's bytes: all layers' keys, then all layers' values."""
        return [page.numpy().tobytes() for page in self._together(group, pages).cpu()]

    def read_pages_into(self, group: int, pages: Sequence[int], targets: Sequence[memoryview]) -> None:
        """As ``read_pages``, each into memory of that size. For one thread, beside the one that computes."""
        if self._device.type != "cpu":
            self._side = self._side or SideStream(self._device)
            read = self._side.read(lambda: self._together(group, pages)).numpy()
            for target, data in zip(targets, read, strict=True):
                np.frombuffer(target, np.uint8)[:] = data
            return
        for page, target in zip(pages, targets, strict=True):
            whole = np.frombuffer(target, np.uint8)
            for part, start, end in self._byte_parts(group):
                whole[start:end] = part[page]

    def write_pages(self, group: int, pages: Sequence[int], data: bytes | memoryview) -> None:
        """Write the result of ``read_pages``, one page after another, to these pages.

        It may be of another rank with the same layout.
        """
        if self._device.type == "cpu":
            received = np.frombuffer(data, np.uint8).reshape(len(pages), -1)
            for pages_of, start, end in self._byte_parts(group):
                pages_of[pages] = received[:, start:end]
            return
        parts = self._parts[group]
        together = upload_bytes(data, self._device).view(parts[0].dtype).view(len(pages), -1)
        index = self._index(pages)
        for part, values in zip(parts, together.split([part.shape[1:].numel() for part in parts], dim=1), strict=True):
            part.index_copy_(0, index, values.view(len(pages), *part.shape[1:]))

    def _together(self, group: int, pages: Sequence[int]) -> Tensor:
        """``read_pages``, on the device: uint8 ``[pages, bytes]``."""
        index = self._index(pages)
        return torch.cat([part.index_select(0, index).flatten(1) for part in self._parts[group]], 1).view(torch.uint8)

    def _index(self, pages: Sequence[int]) -> Tensor:
        return upload_parts([array("i", pages)], self._device)[0].long()

    def _byte_parts(self, group: int) -> list[tuple[npt.NDArray[np.uint8], int, int]]:
        """On a CPU: each tensor's bytes by page, and where a page's begin and end in ``read_pages``.

        Copied without torch, whose calls take longer than the copies.
        """
        found = self._bytes.get(group)
        if found is None:
            parts = [part.flatten(1).view(torch.uint8).numpy() for part in self._parts[group]]
            ends = list(accumulate(part.shape[1] for part in parts))
            found = self._bytes[group] = list(zip(parts, [0, *ends], ends, strict=False))
        return found


def _zeros(memory: HugePages, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    *outer, dim = shape
    # Overwritten now: memory that is not there is missed at the start, and no step waits for the kernel to find it.
    return memory.empty(*outer, dim * dtype.itemsize).view(dtype).zero_()


def page_sizes_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> list[int]:
    """The size of one page of each KV group, over all of its layers."""
    sizes = dict.fromkeys(config.kv_groups, 0)
    for layer, group in zip(config.layers, config.layer_groups, strict=True):
        heads, dims = _shape(layer.mixer)
        sizes[group] += heads * sum(dims) * page_size * dtype.itemsize
    return list(sizes.values())


def _shape(mixer: Mixer) -> tuple[int, list[int]]:
    """KV heads, and the elements of each head's key and, if there is one, value."""
    if isinstance(mixer, LatentSpec):
        return 1, [mixer.latent_dim]
    return mixer.num_kv_heads, [mixer.head_dim, mixer.head_dim]
