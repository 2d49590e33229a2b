"""Llama, Mistral, Qwen2, Qwen3, Phi-3 and OLMo 2: attention and one MLP in each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.errors import UnsupportedModel
from workers.models.fields import Fields
from workers.models.spec import POST_NORMS, PRE_NORMS, AttentionSpec, LayerSpec, MLPSpec, NormNames, QKNorm

LAYER_TYPES = ("full_attention", "sliding_attention")


def llama(f: Fields) -> dict[str, Any]:
    bias = f.flag("attention_bias")
    return {"layers": _layers(f, replace(attention(f), qkv_bias=bias, o_bias=bias))}


def mistral(f: Fields) -> dict[str, Any]:
    return {"layers": _layers(f, attention(f), windows(f))}


def qwen2(f: Fields) -> dict[str, Any]:
    return {"layers": _layers(f, replace(attention(f), qkv_bias=True), qwen_windows(f))}


def qwen3(f: Fields) -> dict[str, Any]:
    bias = f.flag("attention_bias")
    mixer = replace(attention(f), qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.HEAD)
    return {"layers": _layers(f, mixer, qwen_windows(f))}


def phi3(f: Fields) -> dict[str, Any]:
    layers = _layers(f, replace(attention(f), fused_qkv=True), windows(f))
    return {"layers": tuple(replace(layer, feed_forward=replace(mlp(f), fused_gate_up=True)) for layer in layers)}


def olmo2(f: Fields) -> dict[str, Any]:
    bias = f.flag("attention_bias")
    mixer = replace(attention(f), qkv_bias=bias, o_bias=bias, qk_norm=QKNorm.ALL)
    return {"layers": _layers(f, mixer, norms=POST_NORMS)}


# ---- shared with the other families ---------------------------------------------------------------


def attention(f: Fields) -> AttentionSpec:
    """Full attention by the usual fields."""
    num_heads = f.size("num_attention_heads")
    num_kv_heads = f.size("num_key_value_heads", num_heads)
    head_dim = f.size("head_dim", f.size("hidden_size") // num_heads)
    if not head_dim:
        raise UnsupportedModel(
            f"hidden_size: must be at least num_attention_heads, config.json has {f.size('hidden_size')}"
        )
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"num_key_value_heads: {num_kv_heads} does not divide {num_heads} heads")
    return AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, f.rope(head_dim))


def mlp(f: Fields) -> MLPSpec:
    f.one_of("hidden_act", ("silu",), "silu")
    return MLPSpec(f.size("intermediate_size"), bias=f.flag("mlp_bias"))


def windows(f: Fields, default_types: list[str] | None = None) -> list[int]:
    """Each layer's window, 0 for full attention: by ``layer_types``, else by ``default_types``, else the same."""
    window, num_layers = f.count("sliding_window"), f.num_layers()
    types = f.items("layer_types") or default_types or [LAYER_TYPES[bool(window)]] * num_layers
    # A config that was cut to fewer layers keeps the types of all.
    if len(types) < num_layers or not set(types) <= set(LAYER_TYPES):
        raise UnsupportedModel(
            f"layer_types: {types!r} are not supported; supported: {', '.join(LAYER_TYPES)}, one a layer"
        )
    if "sliding_attention" in types[:num_layers] and not window:
        raise UnsupportedModel(f"sliding_window: {window} is not a window, and layer_types has sliding_attention")
    return [window if kind == "sliding_attention" else 0 for kind in types[:num_layers]]


def qwen_windows(f: Fields) -> list[int]:
    """Qwen configs carry a window that ``use_sliding_window`` switches on, from ``max_window_layers`` on."""
    num_layers = f.num_layers()
    if not f.flag("use_sliding_window"):
        return [0] * num_layers
    first = f.count("max_window_layers", num_layers)
    return windows(f, [LAYER_TYPES[i >= first] for i in range(num_layers)])


def _layers(
    f: Fields, mixer: AttentionSpec, windows: list[int] | None = None, norms: NormNames = PRE_NORMS
) -> tuple[LayerSpec, ...]:
    if windows is None:
        f.refuse("sliding_window", 0, "null (full attention)")
        if types := set(f.items("layer_types")) - {"full_attention"}:
            raise UnsupportedModel(f"layer_types: {', '.join(map(str, types))}: this family has full attention alone")
        windows = [0] * f.num_layers()
    return tuple(LayerSpec(replace(mixer, window=window), mlp(f), norms) for window in windows)
