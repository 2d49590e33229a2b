"""DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, grouped routing, shared experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from workers.kernels.grouped_experts import RouterSpec
from workers.models.families.dense import mlp
from workers.models.fields import Fields
from workers.models.spec import ExpertsSpec, LatentSpec, LayerSpec, MLPSpec, RopeConfig


def deepseek_v2(f: Fields) -> dict[str, Any]:
    f.refuse("norm_topk_prob", False, "false")
    method = f.one_of("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    router = _router(f)
    if method == "greedy":
        router = replace(router, num_groups=1, top_groups=1)
    return {"layers": _layers(f, _latent(f, interleaved=True), router)}


def deepseek_v3(f: Fields) -> dict[str, Any]:
    f.one_of("topk_method", ("noaux_tc",), "noaux_tc")
    f.one_of("scoring_func", ("sigmoid",), "sigmoid")
    router = replace(
        _router(f), score="sigmoid", normalize=f.flag("norm_topk_prob", True), group_by_two=True, choice_bias=True
    )
    return {
        "layers": _layers(f, _latent(f, interleaved=f.flag("rope_interleave", True)), router),
        "num_extra_layers": f.count("num_nextn_predict_layers"),
    }


def _latent(f: Fields, *, interleaved: bool) -> LatentSpec:
    nope_dim, rope_dim = f.size("qk_nope_head_dim"), f.size("qk_rope_head_dim")
    rope = f.rope(rope_dim)
    return LatentSpec(
        num_heads=f.size("num_attention_heads"),
        q_rank=f.count("q_lora_rank"),
        kv_rank=f.size("kv_lora_rank"),
        nope_dim=nope_dim,
        v_dim=f.size("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * _yarn_scale(rope),
        rope=rope,
        interleaved=interleaved,
        bias=f.flag("attention_bias"),
    )


def _yarn_scale(rope: RopeConfig) -> float:
    """What YaRN multiplies the scores by, where it does not do so through the rotary embedding."""
    weight, factor = rope.parameters.get("mscale_all_dim"), rope.parameters.get("factor")
    if rope.rope_type == "default" or not weight or not factor or factor <= 1:
        return 1.0
    return float(0.1 * weight * math.log(factor) + 1.0) ** 2


def _router(f: Fields) -> RouterSpec:
    return RouterSpec(
        num_experts=f.num_experts("n_routed_experts"),
        top_k=f.size("num_experts_per_tok"),
        scale=f.number("routed_scaling_factor", 1.0),
        num_groups=f.size("n_group", 1),
        top_groups=f.size("topk_group", 1),
    )


def _layers(f: Fields, mixer: LatentSpec, router: RouterSpec) -> tuple[LayerSpec, ...]:
    size, num_shared = f.size("moe_intermediate_size"), f.count("n_shared_experts")
    experts = ExpertsSpec("deepseek", router, size, shared=MLPSpec(size * num_shared) if num_shared else None)
    first = f.count("first_k_dense_replace")
    step = f.size("moe_layer_freq", 1)
    return tuple(LayerSpec(mixer, mlp(f) if i < first or i % step else experts) for i in range(f.num_layers()))
