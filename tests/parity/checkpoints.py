"""Tiny random checkpoints, written by transformers: the reference and the input of the parity tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
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

LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.1 * i for i in range(8)]}
LONGROPE |= {"long_factor": [1.0 + 0.5 * i for i in range(8)]}
DEEPSEEK_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 6,
    "head_dim": None,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 13,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "routed_scaling_factor": 1.5,
}

CHECKPOINTS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied-bias": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "attention_bias": True}),
    "llama-mlp-bias": (LlamaConfig, LlamaForCausalLM, {"mlp_bias": True}),
    "llama-llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR}),
    "llama-yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 11, "num_key_value_heads": 1}),
    "mistral-window-of-2": (MistralConfig, MistralForCausalLM, {"sliding_window": 2, "head_dim": 10}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "head_dim": 16}),
    "mixtral-window": (MixtralConfig, MixtralForCausalLM, {"sliding_window": 7, "num_local_experts": 5}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"head_dim": 8}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3-window": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
            "attention_bias": True,
            "num_key_value_heads": 1,
        },
    ),
    "qwen2-moe-sparse": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        EXPERTS
        | {"head_dim": 8, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "qwen2-moe": (
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        EXPERTS | {"head_dim": 8, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS | {"norm_topk_prob": True}),
    "qwen3-moe-sparse": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS | {"decoder_sparse_step": 2}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 11, "query_pre_attn_scalar": 24}),
    "gemma2-one-kv-head": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {"sliding_window": 300, "num_key_value_heads": 1, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {"sliding_window": 11, "num_hidden_layers": 7}),
    "gemma3-small-window": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "gpt-oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {"sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    ),
    "gpt-oss-odd": (
        GptOssConfig,
        GptOssForCausalLM,
        {"sliding_window": 5, "num_local_experts": 5, "num_experts_per_tok": 4, "head_dim": 10, "swiglu_limit": 1.5},
    ),
    # The reference's rotary embedding wants even strides: only V3 has a latent of odd rank here.
    "deepseek-v2": (DeepseekV2Config, DeepseekV2ForCausalLM, DEEPSEEK | {"kv_lora_rank": 14}),
    "deepseek-v2-lite": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        DEEPSEEK | {"kv_lora_rank": 14, "q_lora_rank": None, "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek-v2-grouped": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        DEEPSEEK | {"kv_lora_rank": 14, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": (DeepseekV3Config, DeepseekV3ForCausalLM, DEEPSEEK | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek-v3-halves": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        DEEPSEEK | {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False},
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"head_dim": None}),
    "phi3-partial-window": (
        Phi3Config,
        Phi3ForCausalLM,
        {"num_attention_heads": 3, "num_key_value_heads": 1, "partial_rotary_factor": 0.75, "sliding_window": 13},
    ),
    "phi3-longrope": (
        Phi3Config,
        Phi3ForCausalLM,
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 256,
        },
    ),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {"head_dim": None}),
    "olmo2-one-kv-head": (Olmo2Config, Olmo2ForCausalLM, {"num_key_value_heads": 1, "attention_bias": True}),
}
NULLS = {"eos_token_id", "bos_token_id", "pad_token_id", "sliding_window", "q_lora_rank"}
UNSET = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def make_checkpoint(
    name: str, folder: Path, *, seed: int = 0, max_shard_size: str = "1GB", **shape: int
) -> PreTrainedModel:
    """Write the checkpoint to ``folder`` and return the reference model, in fp32 and eval mode."""
    config_type, model_type, changes = CHECKPOINTS[name]
    torch.manual_seed(seed)
    fields = {**SHAPE, **UNSET, **changes, **shape}
    # Without the field, not with null: some configs compute with it.
    model = model_type(config_type(**{k: v for k, v in fields.items() if v is not None or k in NULLS})).eval()
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


def pack_experts(state: dict[str, torch.Tensor], scales: tuple[int, int]) -> None:
    """Have gpt-oss's experts in MXFP4: any codes, with scales from the first to below the second."""
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = state.pop(name).shape
        shape = (experts, rows, columns // 32)
        state[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(*scales, shape, generator=generator, dtype=torch.uint8)
