"""Load a checkpoint folder: safetensors, memory-mapped, each tensor cast and copied once."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from holdfast.errors import UnsupportedModel
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder, DecoderWeights, LayerWeights

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load_decoder(
    folder: Path,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    context_len: int,
) -> Decoder:
    """The model of a Hugging Face checkpoint folder, on ``device`` in ``dtype``.

    Raises UnsupportedModel for pickled weights, and for missing, unknown or misshapen tensors, by name.
    """
    with ExitStack() as stack:
        source = _Tensors(_weight_files(folder), stack, device, dtype)
        weights = _assemble(source, config)
        source.refuse_unused(tied=config.tie_embeddings)
    return Decoder(config, weights, context_len)


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
            raise UnsupportedModel(f"{index.name}: names shards that are not there: {', '.join(missing)}")
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

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._by_name:
            raise UnsupportedModel(f"{name}: this tensor is missing from the checkpoint")
        self._taken.add(name)
        tensor = self._by_name[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(f"{name}: has shape {tuple(tensor.shape)}, config.json asks for {shape}")
        if not tensor.dtype.is_floating_point:
            raise UnsupportedModel(f"{name}: is {tensor.dtype}; supported: float32, float16, bfloat16")
        return tensor.to(self._device, self._dtype)

    def stack(self, parts: list[tuple[str, int]], *shape: int) -> Tensor:
        """Several tensors as one, along the first dimension."""
        return torch.cat([self.take(name, size, *shape) for name, size in parts])

    def refuse_unused(self, *, tied: bool) -> None:
        # Tied checkpoints may carry the head again, old ones the rope's inverse frequencies.
        unused = sorted(
            name
            for name in set(self._by_name) - self._taken
            if not (name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"))
        )
        if unused:
            raise UnsupportedModel(f"{unused[0]}: the checkpoint has tensors that this architecture does not use")


def _assemble(t: _Tensors, c: ModelConfig) -> DecoderWeights:
    hidden, q_size, kv_size = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    table = t.take("model.embed_tokens.weight", c.vocab_size, hidden)
    layers = []
    for i in range(c.num_layers):
        name = f"model.layers.{i}"
        qkv = [(f"{name}.self_attn.{p}_proj", n) for p, n in (("q", q_size), ("k", kv_size), ("v", kv_size))]
        gate_up = [(f"{name}.mlp.{p}_proj", c.intermediate_size) for p in ("gate", "up")]
        layers.append(
            LayerWeights(
                input_norm=t.take(f"{name}.input_layernorm.weight", hidden),
                qkv=t.stack([(f"{part}.weight", n) for part, n in qkv], hidden),
                qkv_bias=t.stack([(f"{part}.bias", n) for part, n in qkv]) if c.qkv_bias else None,
                q_norm=t.take(f"{name}.self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
                k_norm=t.take(f"{name}.self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
                o=t.take(f"{name}.self_attn.o_proj.weight", hidden, q_size),
                o_bias=t.take(f"{name}.self_attn.o_proj.bias", hidden) if c.o_bias else None,
                post_norm=t.take(f"{name}.post_attention_layernorm.weight", hidden),
                gate_up=t.stack([(f"{part}.weight", n) for part, n in gate_up], hidden),
                gate_up_bias=t.stack([(f"{part}.bias", n) for part, n in gate_up]) if c.mlp_bias else None,
                down=t.take(f"{name}.mlp.down_proj.weight", hidden, c.intermediate_size),
                down_bias=t.take(f"{name}.mlp.down_proj.bias", hidden) if c.mlp_bias else None,
            )
        )
    head = table if c.tie_embeddings else t.take("lm_head.weight", c.vocab_size, hidden)
    return DecoderWeights(table, layers, t.take("model.norm.weight", hidden), head)
