"""``config.json`` of a Hugging Face checkpoint. Unsupported values are refused with the field's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.errors import UnsupportedModel
from workers.kernels.paged_attention import HeadShape
from workers.models.families import deepseek, dense, gemma, moe
from workers.models.fields import Fields, read_json
from workers.models.spec import ModelConfig

Families: TypeAlias = dict[str, Callable[[Fields], dict[str, Any]]]
FAMILIES: Families = {
    "DeepseekV2ForCausalLM": deepseek.deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek.deepseek_v3,
    "Gemma2ForCausalLM": gemma.gemma2,
    "Gemma3ForCausalLM": gemma.gemma3,
    "GptOssForCausalLM": moe.gpt_oss,
    "LlamaForCausalLM": dense.llama,
    "MistralForCausalLM": dense.mistral,
    "MixtralForCausalLM": moe.mixtral,
    "Olmo2ForCausalLM": dense.olmo2,
    "Phi3ForCausalLM": dense.phi3,
    "Qwen2ForCausalLM": dense.qwen2,
    "Qwen2MoeForCausalLM": moe.qwen2_moe,
    "Qwen3ForCausalLM": dense.qwen3,
    "Qwen3MoeForCausalLM": moe.qwen3_moe,
}
"""What each architecture's config says beyond what all have: arguments of ``ModelConfig``."""
QUANTIZATIONS = {"fp8": "DeepseekV3ForCausalLM", "mxfp4": "GptOssForCausalLM"}


def read_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` and the end-of-sequence ids of ``generation_config.json``.

    Raises UnsupportedModel, naming the field, its value and what is supported.
    """
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = (read_json(generation) if generation.exists() else {}).get("eos_token_id", raw.get("eos_token_id"))
    return parse_config(Fields(raw), FAMILIES, eos)


def parse_config(fields: Fields, families: Families, eos: int | list[int] | None = None) -> ModelConfig:
    """A model's config from the fields of its ``config.json``. Raises UnsupportedModel."""
    names = fields.items("architectures")
    name = names[0] if len(names) == 1 else str(names)
    if name not in families:
        raise UnsupportedModel(f"architectures: {name} is not supported; supported: {', '.join(families)}")
    vocab_size = fields.size("vocab_size")
    common: dict[str, Any] = {
        "architecture": name,
        "vocab_size": vocab_size,
        "hidden_size": fields.size("hidden_size"),
        "max_context_len": fields.size("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "dtype": fields.dtype(),
        "eos_token_ids": _eos_token_ids(eos, vocab_size),
        "fp8_block": _fp8_block(fields, name),
    }
    config = ModelConfig(**common | families[name](fields))
    _refuse_unequal_heads(config)
    return config


def _fp8_block(fields: Fields, architecture: str) -> tuple[int, int] | None:
    quantization = fields.table("quantization_config")
    method = quantization.get("quant_method", "")
    if quantization and QUANTIZATIONS.get(method) != architecture:
        supported = ", ".join(f"{quant} of {family}" for quant, family in QUANTIZATIONS.items())
        raise UnsupportedModel(
            f"quantization_config: {method or 'this'} is not supported for {architecture}; supported: {supported}"
        )
    if method != "fp8":
        return None
    match quantization.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case block:
            raise UnsupportedModel(f"quantization_config.weight_block_size: {block!r}; supported: [rows, columns]")


def _eos_token_ids(eos: Any, vocab_size: int) -> tuple[int, ...]:
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(not isinstance(token, int) or not 0 <= token < vocab_size for token in ids):
        raise UnsupportedModel(f"eos_token_id: {eos!r} is not supported; supported: ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def _refuse_unequal_heads(config: ModelConfig) -> None:
    """Layers of one KV group share what a step plans for attention."""
    shapes: dict[Any, HeadShape] = {}
    for group, layer in zip(config.layer_groups, config.layers, strict=True):
        shape = layer.mixer.head_shape
        if shapes.setdefault(group, shape) != shape:
            raise UnsupportedModel(f"num_key_value_heads, head_dim: differ among the layers of the {group.kind} group")
