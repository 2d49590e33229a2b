"""Tiny random checkpoints, written by transformers: the reference and the input of the parity tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}

CHECKPOINTS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied-bias": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "attention_bias": True}),
    "llama-mlp-bias": (LlamaConfig, LlamaForCausalLM, {"mlp_bias": True}),
    "llama-llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"head_dim": 8}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
}


def make_checkpoint(
    name: str, folder: Path, *, seed: int = 0, max_shard_size: str = "1GB", **shape: int
) -> PreTrainedModel:
    """Write the checkpoint to ``folder`` and return the reference model, in fp32 and eval mode."""
    config_type, model_type, changes = CHECKPOINTS[name]
    torch.manual_seed(seed)
    model = model_type(config_type(**{**SHAPE, **changes, **shape})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Biases and norms start as 0 and 1, which would hide a missing one; wide logits make
            # greedy tokens mean something.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4.0 if "embed" in parameter_name or "head" in parameter_name else 2.0)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
