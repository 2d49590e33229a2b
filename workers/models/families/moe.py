"""Mixtral (arXiv:2401.04088), Qwen2-MoE, Qwen3-MoE and gpt-oss (arXiv:2508.10925): experts in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workers.kernels.grouped_experts import RouterSpec
from workers.models.families.dense import attention, mlp, qwen_windows, windows
from workers.models.fields import Fields
from workers.models.spec import AttentionSpec, ExpertsSpec, FeedForward, LayerSpec, MLPSpec, QKNorm


def mixtral(f: Fields) -> dict[str, Any]:
    f.one_of("hidden_act", ("silu",), "silu")
    router = RouterSpec(f.num_experts("num_local_experts"), f.size("num_experts_per_tok"), normalize=True)
    experts = ExpertsSpec("mixtral", router, f.size("intermediate_size"))
    mixer = attention(f)
    return {"layers": tuple(LayerSpec(replace(mixer, window=window), experts) for window in windows(f))}


def qwen2_moe(f: Fields) -> dict[str, Any]:
    shared = MLPSpec(f.size("shared_expert_intermediate_size"))
    experts = replace(_qwen_experts(f), shared=shared, shared_gate=True)
    return {"layers": _qwen_layers(f, replace(attention(f), qkv_bias=f.flag("qkv_bias", True)), experts)}


def qwen3_moe(f: Fields) -> dict[str, Any]:
    bias = f.flag("attention_bias")
    mixer = replace(attention(f), qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.HEAD)
    return {"layers": _qwen_layers(f, mixer, _qwen_experts(f))}


def gpt_oss(f: Fields) -> dict[str, Any]:
    bias = f.flag("attention_bias", True)
    mixer = replace(attention(f), qkv_bias=bias, o_bias=bias, sinks=True)
    router = RouterSpec(
        f.num_experts("num_local_experts"), f.size("num_experts_per_tok"), score="top_softmax", bias=True
    )
    experts = ExpertsSpec(
        "gpt_oss",
        router,
        f.size("intermediate_size"),
        activation="clamped_swiglu",
        bias=True,
        limit=f.number("swiglu_limit", 7.0),
        alpha=f.number("swiglu_alpha", 1.702),
    )
    types = ["sliding_attention", "full_attention"] * f.num_layers()
    return {"layers": tuple(LayerSpec(replace(mixer, window=window), experts) for window in windows(f, types))}


def _qwen_experts(f: Fields) -> ExpertsSpec:
    num_experts = f.num_experts("num_experts", f.count("num_local_experts") or None)
    router = RouterSpec(num_experts, f.size("num_experts_per_tok"), normalize=f.flag("norm_topk_prob"))
    return ExpertsSpec("qwen", router, f.size("moe_intermediate_size"))


def _qwen_layers(f: Fields, mixer: AttentionSpec, experts: ExpertsSpec) -> tuple[LayerSpec, ...]:
    step, dense_layers = f.size("decoder_sparse_step", 1), f.items("mlp_only_layers")

    def feed_forward(i: int) -> FeedForward:
        return mlp(f) if i in dense_layers or (i + 1) % step else experts

    return tuple(LayerSpec(replace(mixer, window=window), feed_forward(i)) for i, window in enumerate(qwen_windows(f)))
