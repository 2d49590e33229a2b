"""Gemma 2 (arXiv:2408.00118) and Gemma 3's text model (arXiv:2503.19786): windows beside full attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workers.models.families.dense import LAYER_TYPES, attention, windows
from workers.models.fields import Fields
from workers.models.spec import SANDWICH_NORMS, LayerSpec, MLPSpec, QKNorm

GEMMA3_PATTERN = 6
"""Five layers with a window, then one with full attention."""
GEMMA3_LOCAL_THETA = 10_000.0


def gemma2(f: Fields) -> dict[str, Any]:
    return _gemma(f, ["sliding_attention", "full_attention"] * f.num_layers())


def gemma3(f: Fields) -> dict[str, Any]:
    pattern = f.size("sliding_window_pattern", f.size("_sliding_window_pattern", GEMMA3_PATTERN))
    types = [LAYER_TYPES[bool((i + 1) % pattern)] for i in range(f.num_layers())]
    return _gemma(f, types, qk_norm=QKNorm.HEAD, local_theta=f.number("rope_local_base_freq", GEMMA3_LOCAL_THETA))


def _gemma(
    f: Fields, types: list[str], qk_norm: QKNorm = QKNorm.NONE, local_theta: float | None = None
) -> dict[str, Any]:
    f.refuse("use_bidirectional_attention", False, "false")
    base = attention(f)
    bias = f.flag("attention_bias")
    mixer = replace(
        base,
        scale=f.scale_of("query_pre_attn_scalar", base.head_dim),
        softcap=f.number("attn_logit_softcapping", 0.0),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        rope=f.rope(base.head_dim, "full_attention"),
    )
    local = replace(mixer, rope=f.rope(base.head_dim, "sliding_attention", local_theta))
    activation = f.one_of("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    feed_forward = MLPSpec(f.size("intermediate_size"), activation)
    layers = [
        LayerSpec(replace(local if window else mixer, window=window), feed_forward, SANDWICH_NORMS)
        for window in windows(f, types)
    ]
    return {
        "layers": tuple(layers),
        "tie_embeddings": f.flag("tie_word_embeddings", True),
        "norm_adds_one": True,
        "embedding_scale": f.size("hidden_size") ** 0.5,
        "logit_softcap": f.number("final_logit_softcapping", 0.0),
    }
