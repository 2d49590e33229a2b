"""``config.json`` of a Hugging Face checkpoint. Unsupported values are refused with the field's name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import UnsupportedModel
from workers.models.parallel import Shard

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NUMBER = (int, float)
KINDS: dict[str, type | tuple[type, ...]] = {
    "architectures": list,
    "head_dim": int,
    "layer_types": list,
    "num_key_value_heads": int,
    "partial_rotary_factor": NUMBER,
    "rms_norm_eps": NUMBER,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "rope_scaling.rope_theta": NUMBER,
    "rope_theta": NUMBER,
}
KIND_NAMES = {list: "a list", int: "an integer", NUMBER: "a number", dict: "an object"}


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from Llama."""

    qkv_bias: bool | None = None
    """None: ``attention_bias`` decides, for q, k, v and o alike."""
    qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(qkv_bias=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and, if scaled, how."""

    theta: float = 10_000.0
    rope_type: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's hyperparameters. Lengths in tokens, sizes in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_len: int
    norm_eps: float
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    def shard(self, shard: Shard) -> ModelConfig:
        """One tensor-parallel rank's part of the model: its heads and its share of the MLP.

        With more ranks than KV heads, several ranks hold the same KV head. Vocabulary and hidden size stay
        the whole model's. Raises UnsupportedModel if the sizes do not divide by the ranks.
        """
        size = shard.size
        if self.num_heads % size:
            raise UnsupportedModel(f"num_attention_heads: {self.num_heads} cannot be divided among {size} ranks")
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise UnsupportedModel(f"num_key_value_heads: {self.num_kv_heads} cannot be divided among {size} ranks")
        if self.intermediate_size % size:
            raise UnsupportedModel(f"intermediate_size: {self.intermediate_size} cannot be divided among {size} ranks")
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            intermediate_size=self.intermediate_size // size,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read ``config.json`` and the end-of-sequence ids of ``generation_config.json``.

        Raises UnsupportedModel, naming the field, its value and what is supported.
        """
        raw = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = (_read_json(generation) if generation.exists() else {}).get("eos_token_id", raw.get("eos_token_id"))
        return cls.from_dict(raw, eos)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], eos: int | list[int] | None = None) -> ModelConfig:
        _refuse_malformed(raw)
        architectures = raw.get("architectures") or []
        name = architectures[0] if len(architectures) == 1 else str(architectures)
        if name not in FAMILIES:
            raise UnsupportedModel(f"architectures: {name} is not supported; supported: {', '.join(FAMILIES)}")
        family = FAMILIES[name]
        _refuse_unsupported(raw)
        vocab_size = _require(raw, "vocab_size")
        num_heads = _require(raw, "num_attention_heads")
        hidden_size = _require(raw, "hidden_size")
        num_kv_heads = raw.get("num_key_value_heads") or num_heads
        head_dim = raw.get("head_dim") or hidden_size // num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedModel(f"num_key_value_heads: {num_kv_heads} does not divide {num_heads} heads")
        attention_bias = bool(raw.get("attention_bias", False))
        dtype_name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype_name not in DTYPES:
            raise UnsupportedModel(f"dtype: {dtype_name} is not supported; supported: {', '.join(DTYPES)}")
        return cls(
            architecture=name,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=_require(raw, "intermediate_size"),
            num_layers=_require(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_context_len=_require(raw, "max_position_embeddings"),
            norm_eps=float(raw.get("rms_norm_eps") or 1e-6),
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias and family.qkv_bias is None,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            rope=_rope_config(raw),
            dtype=DTYPES[dtype_name],
            eos_token_ids=_eos_token_ids(eos, vocab_size),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path.name}: not found in {path.parent}; a checkpoint folder needs it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UnsupportedModel(f"{path.name}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path.name}: must hold a JSON object")
    return value


def _require(raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"{key}: must be a positive integer, config.json has {value!r}")
    return value


def _refuse_malformed(raw: dict[str, Any]) -> None:
    """Refuse optional fields that are present with a wrong type."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    inside = {f"rope_scaling.{key}": value for key, value in rope.items()} if isinstance(rope, dict) else {}
    for key, kind in KINDS.items():
        value = (raw | inside).get(key)
        if value is not None and not isinstance(value, kind):
            raise UnsupportedModel(f"{key}: must be {KIND_NAMES[kind]}, config.json has {value!r}")


def _eos_token_ids(eos: Any, vocab_size: int) -> tuple[int, ...]:
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(not isinstance(token, int) or not 0 <= token < vocab_size for token in ids):
        raise UnsupportedModel(f"eos_token_id: {eos!r} is not supported; supported: ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act: {raw['hidden_act']!r} is not supported; supported: silu")
    if raw.get("quantization_config"):
        raise UnsupportedModel("quantization_config: quantized checkpoints are not supported; supported: none")
    # Qwen configs carry a window that use_sliding_window switches off.
    windowed = raw.get("sliding_window") and raw.get("use_sliding_window", True)
    if windowed or any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise UnsupportedModel(
            f"sliding_window: {raw.get('sliding_window')} is not supported; supported: null (full attention)"
        )


def _rope_config(raw: dict[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters (with rope_theta inside), 4 wrote rope_scaling beside rope_theta.
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    theta = float(scaling.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0)
    if rope_type not in ROPE_TYPES:
        raise UnsupportedModel(
            f"rope_scaling.rope_type: {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    partial = scaling.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor: {partial} is not supported; supported: 1.0")
    # Old yarn configs leave the trained length to max_position_embeddings.
    scaling.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
    for key in needed.get(rope_type, ()):
        if not isinstance(scaling.get(key), (int, float)):
            raise UnsupportedModel(f"rope_scaling.{key}: must be a number for rope type {rope_type}")
    return RopeConfig(theta, rope_type, scaling)
