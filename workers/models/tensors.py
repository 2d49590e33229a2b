"""The tensors of a checkpoint folder: safetensors, memory-mapped, each cast and copied once."""

from __future__ import annotations

import json
import re
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from holdfast.errors import UnsupportedModel
from workers.kernels.packed import GROUP, FP8Weight, MXFP4Weight, from_fp8_blocks

Part: TypeAlias = tuple[int, int]
"""``[start, end)`` of a dimension."""
FINGERPRINT_BYTES = 1024 * 1024
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FP8_SCALES = "_scale_inv"


def fingerprint(folder: Path) -> str:
    """A fingerprint of a checkpoint's config, and of each weight file's end and size, without reading all of it."""
    crc = zlib.crc32((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - FINGERPRINT_BYTES))
            crc = zlib.crc32(file.read() + str(size).encode(), crc)
    return f"{crc:08x}"


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint, in order. Raises UnsupportedModel."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UnsupportedModel(f"{index.name}: not a valid shard index ({error!r})") from None
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise UnsupportedModel(f"{index.name}: names missing shards: {', '.join(missing)}")
        return [folder / name for name in names]
    if single.exists():
        return [single]
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise UnsupportedModel(f"{pickled[0]}: pickled weights are refused; convert the checkpoint to safetensors")
    raise UnsupportedModel(f"model.safetensors: not found in {folder}; supported: safetensors, single or sharded")


class Tensors:
    """The tensors of a checkpoint by name; remembers which were taken. Methods raise UnsupportedModel."""

    def __init__(
        self,
        files: list[Path],
        stack: ExitStack,
        device: torch.device,
        dtype: torch.dtype,
        fp8_block: tuple[int, int] | None = None,
    ) -> None:
        self.device, self._dtype, self._fp8_block = device, dtype, fp8_block
        self._by_name: dict[str, Any] = {}
        for path in files:
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UnsupportedModel(f"{path.name}: not a readable safetensors file ({error})") from None
            self._by_name.update(dict.fromkeys(opened.keys(), opened))
        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._by_name

    def take(
        self, name: str, *shape: int, dim: int = 0, part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """A tensor of that shape, or positions ``part`` of its dimension ``dim``, in ``dtype`` (default: the model's).

        Reads no more than it returns, unless it is quantized.
        """
        stored = self._stored(name, shape)
        if name + FP8_SCALES in self._by_name and self._fp8_block is not None:
            tensor = self._from_fp8(name, stored[:], self._fp8_block)
            tensor = tensor if part is None else tensor.narrow(dim, part[0], part[1] - part[0])
        else:
            index = (slice(None),) * dim + (slice(*part),) if part is not None else slice(None)
            tensor = stored[index]
            if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
                raise UnsupportedModel(f"{name}: is {tensor.dtype}; supported: float32, float16, bfloat16")
        return tensor.to(self.device, dtype or self._dtype).contiguous()

    def take_ids(self, name: str, count: int) -> Tensor:
        """``count`` integers, as int64."""
        ids: Tensor = self._stored(name, (count,))[:]
        if ids.dtype not in (torch.int32, torch.int64):
            raise UnsupportedModel(f"{name}: is {ids.dtype}; supported: int32, int64")
        return ids.to(self.device, torch.int64)

    def scalar(self, name: str, default: float) -> float:
        """A tensor of one positive number, or ``default`` if there is none."""
        if name not in self._by_name:
            return default
        self._taken.add(name)
        value: Tensor = self._by_name[name].get_tensor(name).float()
        if value.numel() != 1 or not 0.0 < value.item() < float("inf"):
            raise UnsupportedModel(f"{name}: must be one positive number, and has shape {tuple(value.shape)}")
        return float(value.item())

    def take_mxfp4(self, name: str, *shape: int) -> MXFP4Weight:
        """``[experts, rows, columns]`` from ``name_blocks`` and ``name_scales``, on the host."""
        groups = -(-shape[-1] // GROUP)
        blocks = self._stored(f"{name}_blocks", (*shape[:-1], groups, GROUP // 2))[:]
        scales = self._stored(f"{name}_scales", (*shape[:-1], groups))[:]
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise UnsupportedModel(f"{name}_blocks: is {blocks.dtype}; MXFP4 is stored as uint8")
        return MXFP4Weight(blocks, scales, shape[-1])

    def take_fp8(self, name: str, rows: int, columns: int) -> FP8Weight | None:
        """A matrix with its scales, on the host; None if it is not in FP8 blocks."""
        if name + FP8_SCALES not in self._by_name or self._fp8_block is None:
            return None
        values = self._stored(name, (rows, columns))[:]
        if values.dtype != torch.float8_e4m3fn:
            raise UnsupportedModel(f"{name}: is {values.dtype}, and has scales; supported: float8_e4m3fn")
        return FP8Weight(values[None], self._fp8_scales(name, rows, columns, self._fp8_block)[None], self._fp8_block)

    def skip(self, prefix: str) -> None:
        """These tensors are another rank's."""
        self._taken.update(name for name in self._by_name if name.startswith(prefix))

    def stack(self, parts: list[tuple[str, int, Part]], *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Parts of several tensors, concatenated along the first dimension, in ``dtype`` (default: the model's)."""
        return torch.cat([self.take(name, size, *shape, part=part, dtype=dtype) for name, size, part in parts])

    def refuse_unused(self, *, tied: bool, num_layers: int, num_extra_layers: int) -> None:
        """Refuse a checkpoint with tensors that nobody took: it is not what its config says."""
        for name in sorted(set(self._by_name) - self._taken):
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            # Tied checkpoints may contain the head too, and old ones rope's inverse frequencies.
            known = name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
            extra = layer is not None and num_layers <= int(layer[1]) < num_layers + num_extra_layers
            if not known and not extra:
                raise UnsupportedModel(f"{name}: the checkpoint has a tensor that this architecture does not use")

    def _stored(self, name: str, shape: tuple[int, ...]) -> Any:
        if name not in self._by_name:
            raise UnsupportedModel(f"{name}: this tensor is missing from the checkpoint")
        self._taken.add(name)
        stored = self._by_name[name].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise UnsupportedModel(f"{name}: has shape {tuple(stored.get_shape())}, config.json asks for {shape}")
        return stored

    def _from_fp8(self, name: str, weight: Tensor, block: tuple[int, int]) -> Tensor:
        rows, columns = weight.shape
        return from_fp8_blocks(weight, self._fp8_scales(name, rows, columns, block), block)

    def _fp8_scales(self, name: str, rows: int, columns: int, block: tuple[int, int]) -> Tensor:
        scales: Tensor = self._stored(name + FP8_SCALES, (-(-rows // block[0]), -(-columns // block[1])))[:]
        return scales
