"""What a model is made of: a list of layers, each a mixer and a feed-forward part. Sizes in elements.

A family maps its ``config.json`` to these; nothing below the families knows one model from another.
``shard`` gives one tensor-parallel rank's part (the scheme of Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch

from holdfast.errors import UnsupportedModel
from workers.kernels.grouped_experts import RouterSpec
from workers.kernels.paged_attention import HeadShape
from workers.models.parallel import Shard


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first ``dim`` elements of a head: base frequency and, if scaled, how."""

    dim: int
    theta: float = 10_000.0
    rope_type: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)


class QKNorm(Enum):
    """RMS norm of queries and keys before the rotary embedding."""

    NONE = "none"
    HEAD = "head"
    """Of each head by itself."""
    ALL = "all"
    """Of all heads together (OLMo 2, arXiv:2501.00656)."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention (arXiv:2305.13245)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig
    window: int = 0
    """Tokens that a token attends to, itself included; 0: all."""
    softcap: float = 0.0
    """Scores are ``softcap * tanh(score / softcap)``; 0: as they are (Gemma 2, arXiv:2408.00118)."""
    sinks: bool = False
    """Each head has a learned score that takes part in the softmax, without a value (gpt-oss)."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    fused_qkv: bool = False
    """The checkpoint has one tensor for the three projections."""
    num_inputs: int = 1
    """Hidden states side by side that the projections read: 2 in a draft head."""

    @property
    def head_shape(self) -> HeadShape:
        return HeadShape(self.num_heads // self.num_kv_heads, self.head_dim)

    def shard(self, shard: Shard) -> AttentionSpec:
        """One rank's heads. With more ranks than KV heads, several ranks hold the same KV head."""
        size = shard.size
        _require_divides("num_attention_heads", self.num_heads, size)
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise UnsupportedModel(f"num_key_value_heads: {self.num_kv_heads} cannot be divided among {size} ranks")
        return replace(self, num_heads=self.num_heads // size, num_kv_heads=max(1, self.num_kv_heads // size))


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): every head attends to one latent a token."""

    num_heads: int
    q_rank: int
    """Rank of the queries' projection; 0: not factored."""
    kv_rank: int
    nope_dim: int
    v_dim: int
    scale: float
    rope: RopeConfig
    interleaved: bool
    """The rotary embedding rotates neighbouring elements in the checkpoint's order."""
    bias: bool = False

    @property
    def latent_dim(self) -> int:
        """Elements of KV a token: the latent, and the key that carries the position."""
        return self.kv_rank + self.rope.dim

    @property
    def head_shape(self) -> HeadShape:
        return HeadShape(self.num_heads, self.kv_rank)

    def shard(self, shard: Shard) -> LatentSpec:
        """One rank's heads. Every rank has the whole latent."""
        _require_divides("num_attention_heads", self.num_heads, shard.size)
        return replace(self, num_heads=self.num_heads // shard.size)


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """``down(activation(gate(x)) * up(x))``."""

    size: int
    activation: str = "silu"
    bias: bool = False
    fused_gate_up: bool = False
    """The checkpoint has one tensor for the two projections."""

    def shard(self, shard: Shard) -> MLPSpec:
        _require_divides("intermediate_size", self.size, shard.size)
        return replace(self, size=self.size // shard.size)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts, each an MLP of ``size``, and perhaps one that computes every token."""

    layout: str
    """How the checkpoint names and stores the experts: a key of ``loader.EXPERT_NAMES``."""
    router: RouterSpec
    size: int
    activation: str = "silu"
    bias: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    """Of gpt-oss's clamped SwiGLU."""
    shared: MLPSpec | None = None
    shared_gate: bool = False
    first: int = 0
    num_local: int = 0
    """This rank's experts: ``[first, first + num_local)``."""

    def shard(self, shard: Shard) -> ExpertsSpec:
        """Each expert's share of its width, or whole experts if the shard is by expert."""
        shared = self.shared.shard(shard) if self.shared is not None else None
        if not shard.by_expert:
            _require_divides("moe_intermediate_size", self.size, shard.size)
            return replace(self, size=self.size // shard.size, shared=shared)
        _require_divides("num_experts", self.router.num_experts, shard.size)
        num_local = self.router.num_experts // shard.size
        return replace(self, first=shard.rank * num_local, num_local=num_local, shared=shared)


Mixer: TypeAlias = AttentionSpec | LatentSpec
FeedForward: TypeAlias = MLPSpec | ExpertsSpec


class NormNames(NamedTuple):
    """The checkpoint's names of a layer's norms; empty where there is none."""

    before_mixer: str = "input_layernorm"
    after_mixer: str = ""
    before_feed_forward: str = "post_attention_layernorm"
    after_feed_forward: str = ""


PRE_NORMS = NormNames()
POST_NORMS = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")
SANDWICH_NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: ``x += mixer(x)``, then ``x += feed_forward(x)``, with norms before or after each."""

    mixer: Mixer
    feed_forward: FeedForward
    norms: NormNames = PRE_NORMS

    def shard(self, shard: Shard) -> LayerSpec:
        return replace(self, mixer=self.mixer.shard(shard), feed_forward=self.feed_forward.shard(shard))


class KVGroup(NamedTuple):
    """Layers that share page tables: their kind (``full``, ``latent``, ``window``) and window."""

    kind: str
    window: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's hyperparameters."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_context_len: int
    norm_eps: float
    tie_embeddings: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    norm_adds_one: bool = False
    """Norms multiply by ``1 + weight``, in fp32 (Gemma)."""
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    fp8_block: tuple[int, int] | None = None
    """Rows and columns of the blocks in which the checkpoint quantizes its large weights to FP8."""
    num_extra_layers: int = 0
    """Layers of the checkpoint past the last that are not loaded (they predict further tokens)."""

    def shard(self, shard: Shard) -> ModelConfig:
        """One tensor-parallel rank's part of the model. Vocabulary and hidden size stay the whole model's.

        Raises UnsupportedModel if the sizes do not divide by the ranks.
        """
        return replace(self, layers=tuple(layer.shard(shard) for layer in self.layers))

    @property
    def layer_groups(self) -> tuple[KVGroup, ...]:
        """Each layer's KV group."""
        return tuple(_kv_group(layer.mixer) for layer in self.layers)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The KV groups, in the order of their first layers."""
        return tuple(dict.fromkeys(self.layer_groups))

    @property
    def head_shapes(self) -> tuple[HeadShape, ...]:
        """By KV group. A group's layers have the same."""
        shapes = {group: layer.mixer.head_shape for group, layer in zip(self.layer_groups, self.layers, strict=True)}
        return tuple(shapes.values())


def _kv_group(mixer: Mixer) -> KVGroup:
    if isinstance(mixer, LatentSpec):
        return KVGroup("latent", 0)
    return KVGroup("window", mixer.window) if mixer.window else KVGroup("full", 0)


def _require_divides(name: str, size: int, num_ranks: int) -> None:
    if size % num_ranks:
        raise UnsupportedModel(f"{name}: {size} cannot be divided among {num_ranks} ranks")
