"""Load a checkpoint folder: safetensors, memory-mapped, each tensor cast and copied once."""

from __future__ import annotations

import json
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad

from holdfast.errors import UnsupportedModel
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder, DecoderWeights, LayerWeights
from workers.models.parallel import RankGroup, Shard

Part: TypeAlias = tuple[int, int]
"""``[start, end)`` of a dimension."""
FINGERPRINT_BYTES = 1024 * 1024
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load_decoder(
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context_len: int,
    group: RankGroup | None = None,
) -> Decoder:
    """Load a Hugging Face checkpoint folder to ``device`` in ``dtype``; in a group, this rank's shard.

    Raises UnsupportedModel for pickled weights, for sizes that do not divide by the group's ranks, and for
    missing, unknown or misshapen tensors, which it names.
    """
    shard = group.shard if group is not None else Shard()
    part = config.shard(shard)
    with ExitStack() as stack:
        source = _Tensors(_weight_files(folder), stack, device, dtype)
        weights = _assemble(source, config, shard)
        source.refuse_unused(tied=config.tie_embeddings)
    return Decoder(part, weights, context_len, group)


def fingerprint(folder: Path) -> str:
    """A fingerprint of a checkpoint's config, and of each weight file's end and size, without reading all of it."""
    crc = zlib.crc32((folder / "config.json").read_bytes())
    for path in _weight_files(folder):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - FINGERPRINT_BYTES))
            crc = zlib.crc32(file.read() + str(size).encode(), crc)
    return f"{crc:08x}"


def _weight_files(folder: Path) -> list[Path]:
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


class _Tensors:
    """The tensors of a checkpoint by name; remembers which were taken."""

    def __init__(self, files: list[Path], stack: ExitStack, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._by_name = {}
        for path in files:
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UnsupportedModel(f"{path.name}: not a readable safetensors file ({error})") from None
            self._by_name.update(dict.fromkeys(opened.keys(), opened))
        self._taken: set[str] = set()

    def take(self, name: str, *shape: int, dim: int = 0, part: Part | None = None) -> Tensor:
        """A tensor of that shape, or positions ``part`` of its dimension ``dim``. Reads no more than it returns."""
        if name not in self._by_name:
            raise UnsupportedModel(f"{name}: this tensor is missing from the checkpoint")
        self._taken.add(name)
        stored = self._by_name[name].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise UnsupportedModel(f"{name}: has shape {tuple(stored.get_shape())}, config.json asks for {shape}")
        tensor: Tensor = stored[:] if part is None else stored[slice(*part)] if dim == 0 else stored[:, slice(*part)]
        if not tensor.dtype.is_floating_point:
            raise UnsupportedModel(f"{name}: is {tensor.dtype}; supported: float32, float16, bfloat16")
        return tensor.to(self._device, self._dtype).contiguous()

    def stack(self, parts: list[tuple[str, int, Part]], *shape: int) -> Tensor:
        """Parts of several tensors, concatenated along the first dimension."""
        return torch.cat([self.take(name, size, *shape, part=part) for name, size, part in parts])

    def refuse_unused(self, *, tied: bool) -> None:
        # Tied checkpoints may contain the head too, and old ones rope's inverse frequencies.
        unused = sorted(
            name
            for name in set(self._by_name) - self._taken
            if not (name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"))
        )
        if unused:
            raise UnsupportedModel(f"{unused[0]}: the checkpoint has a tensor that this architecture does not use")


def _assemble(t: _Tensors, c: ModelConfig, shard: Shard) -> DecoderWeights:
    """This rank's part of the model ``c``: its heads' or its neurons' rows or columns of each projection."""
    hidden, q_size, kv_size = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    q, mlp = shard.of(q_size), shard.of(c.intermediate_size)
    # With more ranks than KV heads, neighbouring ranks hold the KV head of their query heads.
    kv_head = shard.rank * c.num_kv_heads // shard.size
    kv = (kv_head * c.head_dim, (kv_head + max(1, c.num_kv_heads // shard.size)) * c.head_dim)

    def row_bias(name: str, present: bool) -> Tensor | None:
        # A row-parallel product is summed over the ranks, so only one of them adds the bias.
        bias = t.take(name, hidden) if present else None
        return bias if shard.rank == 0 else None

    table = _vocabulary(t, "model.embed_tokens.weight", c, shard)
    layers = []
    for i in range(c.num_layers):
        name = f"model.layers.{i}"
        attention = (("q", q_size, q), ("k", kv_size, kv), ("v", kv_size, kv))
        qkv = [(f"{name}.self_attn.{p}_proj", n, part) for p, n, part in attention]
        gate_up = [(f"{name}.mlp.{p}_proj", c.intermediate_size, mlp) for p in ("gate", "up")]
        layers.append(
            LayerWeights(
                input_norm=t.take(f"{name}.input_layernorm.weight", hidden),
                qkv=t.stack([(f"{part}.weight", n, mine) for part, n, mine in qkv], hidden),
                qkv_bias=t.stack([(f"{part}.bias", n, mine) for part, n, mine in qkv]) if c.qkv_bias else None,
                q_norm=t.take(f"{name}.self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
                k_norm=t.take(f"{name}.self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
                o=t.take(f"{name}.self_attn.o_proj.weight", hidden, q_size, dim=1, part=q),
                o_bias=row_bias(f"{name}.self_attn.o_proj.bias", c.o_bias),
                post_norm=t.take(f"{name}.post_attention_layernorm.weight", hidden),
                gate_up=t.stack([(f"{part}.weight", n, mine) for part, n, mine in gate_up], hidden),
                gate_up_bias=t.stack([(f"{part}.bias", n, mine) for part, n, mine in gate_up]) if c.mlp_bias else None,
                down=t.take(f"{name}.mlp.down_proj.weight", hidden, c.intermediate_size, dim=1, part=mlp),
                down_bias=row_bias(f"{name}.mlp.down_proj.bias", c.mlp_bias),
            )
        )
    head = table if c.tie_embeddings else _vocabulary(t, "lm_head.weight", c, shard)
    return DecoderWeights(table, layers, t.take("model.norm.weight", hidden), head)


def _vocabulary(t: _Tensors, name: str, c: ModelConfig, shard: Shard) -> Tensor:
    """This rank's rows of a ``[vocab_size, hidden]`` table, padded with zeros to equal shares."""
    start, end = shard.of(c.vocab_size)
    rows = t.take(name, c.vocab_size, c.hidden_size, part=(start, end))
    return pad(rows, (0, 0, 0, -(-c.vocab_size // shard.size) - (end - start)))
