"""A decoder over page tables: a list of layers, each a mixer and a feed-forward part (see ``spec``).

The forward pass reads its batch only from tensors and lengths, and its only state is the KV pool. So a
batch of decodes can be captured as a graph, and a rank can run any step of its log.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workers.kernels.backend import TORCH, Backend
from workers.kernels.elementwise import Places, Rotation
from workers.kernels.products import Weight
from workers.models.feed_forward import ExpertsWeights, MLPWeights, experts, mlp
from workers.models.kv_pool import KVPool
from workers.models.mixers import (
    AttentionWeights,
    GroupBatch,
    LatentWeights,
    Position,
    attention,
    latent_attention,
)
from workers.models.parallel import RankGroup
from workers.models.rope import rope_table
from workers.models.spec import AttentionSpec, LatentSpec, LayerSpec, MLPSpec, ModelConfig, RopeConfig


@dataclass(slots=True)
class ForwardBatch:
    """One step's work, one sequence after another (see ``kernels.paged_attention``)."""

    tokens: Tensor
    """int64 ``[tokens]``"""
    positions: Tensor
    """int64 ``[tokens]``"""
    write_offsets: Tensor
    """int64 ``[tokens]``: where in its page each token's KV goes"""
    groups: list[GroupBatch]
    """By KV group."""
    logit_rows: Tensor
    """int64 ``[samples]``: which tokens' logits are wanted"""
    states: Tensor | None = None
    """``[tokens, hidden]``: what a draft head continues from (see ``heads``)"""


class Hidden(NamedTuple):
    """What a forward pass leaves before the logits."""

    normed: Tensor
    """``[samples, hidden]``: after the last norm, which logits are computed from"""
    last: Tensor
    """``[samples, hidden]``: before it"""
    taps: list[Tensor]
    """``[tokens, hidden]`` each: see ``Decoder.hidden``"""


@dataclass(slots=True)
class LayerWeights:
    """One layer; norms that it does not have are None."""

    before_mixer: Tensor | None
    after_mixer: Tensor | None
    before_feed_forward: Tensor | None
    after_feed_forward: Tensor | None
    mixer: AttentionWeights | LatentWeights
    feed_forward: MLPWeights | ExpertsWeights


@dataclass(slots=True)
class DecoderWeights:
    embedding: Weight
    layers: list[LayerWeights]
    final_norm: Tensor
    head: Weight
    """The embedding, if the two are tied."""


class Decoder:
    """The model: weights, the rope tables, and ``forward``."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        context_len: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        group: RankGroup | None = None,
        kernels: Backend = TORCH,
    ) -> None:
        """``config`` is this rank's shard (``ModelConfig.shard``), ``group`` the ranks that hold the others.

        ``dtype``: of activations.
        """
        self.config = config
        self._kernels, self._ops = kernels, kernels.elementwise
        self._group = group
        self.weights = weights
        self.dtype, self.device = dtype, device
        # Rounded to the weights' precision, as the checkpoint's authors do.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        groups = config.kv_groups
        self._group_of = [groups.index(group) for group in config.layer_groups]
        self._ropes: list[RopeConfig] = []
        for layer in config.layers:
            if layer.mixer.rope not in self._ropes:
                self._ropes.append(layer.mixer.rope)
        self._rope_of = [self._ropes.index(layer.mixer.rope) for layer in config.layers]
        self._tables = [
            [part.to(self.device, self.dtype)[:, None, :] for part in rope_table(rope, context_len)]
            for rope in self._ropes
        ]

    @property
    def kv_scales(self) -> list[tuple[float, float]]:
        """By layer: see ``AttentionWeights.kv_scales``."""
        mixers = [layer.mixer for layer in self.weights.layers]
        return [mixer.kv_scales if isinstance(mixer, AttentionWeights) else (1.0, 1.0) for mixer in mixers]

    def on(self, group: Callable[[RankGroup], RankGroup]) -> Decoder:
        """The same decoder in another group, if it is in one."""
        other = copy.copy(self)
        other._group = None if self._group is None else group(self._group)
        return other

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """Write the batch's KV and return fp32 logits ``[samples, vocab_size]``. For inference mode.

        In a group, rank 0 gets the logits; the others get their own part of the vocabulary.
        """
        return self.logits(self.hidden(batch, kv).normed)

    def hidden(self, batch: ForwardBatch, kv: KVPool, taps: Sequence[int] = ()) -> Hidden:
        """Write the batch's KV and return the samples' last hidden states.

        ``taps``: layers whose inputs are wanted too, of all tokens; the number of layers stands for what the last norm
        gives.
        """
        ops, eps, norm = self._ops, self.config.norm_eps, self.weights.final_norm
        rotations = [Rotation(*(ops.gather(part, batch.positions) for part in table)) for table in self._tables]
        tapped: dict[int, Tensor] = {}
        delta: Tensor | None = None
        x, hidden = self._enter(batch, self.weights.layers[0])
        for i, (spec, weights) in enumerate(zip(self.config.layers, self.weights.layers, strict=True)):
            if delta is not None:
                x, hidden = ops.add_norm(hidden, delta, weights.before_mixer, eps)
            if i in taps:
                tapped[i] = hidden
            pages = batch.groups[self._group_of[i]]
            places = Places(kv.k[i], kv.v[i], pages.write_pages, batch.write_offsets, kv.scales[i])
            at = Position(places, pages.attention, rotations[self._rope_of[i]], self._kernels)
            hidden, delta = self._layer(x, hidden, spec, weights, at)
        assert delta is not None, "a model has layers"
        if len(self.config.layers) in taps:
            tapped[len(self.config.layers)] = ops.add_norm(hidden, delta, norm, eps)[0]
        rows = batch.logit_rows
        last, last_delta = ops.gather(hidden, rows), ops.gather(delta, rows)
        return Hidden(*ops.add_norm(last, last_delta, norm, eps), [tapped[i] for i in taps])

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits ``[samples, vocab_size]`` of ``hidden``; in a group, see ``forward``."""
        return self.whole_logits(self._kernels.products.logits(hidden, self.weights.head))

    def whole_logits(self, part: Tensor) -> Tensor:
        """Of this rank's part of the vocabulary."""
        logits, cap = self._gathered(part), self.config.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _enter(self, batch: ForwardBatch, first: LayerWeights) -> tuple[Tensor, Tensor]:
        """What the first layer's mixer reads, and the residual stream."""
        return self._ops.add_norm(self._embed(batch.tokens), None, first.before_mixer, self.config.norm_eps)

    def _layer(
        self, x: Tensor, hidden: Tensor, spec: LayerSpec, w: LayerWeights, at: Position
    ) -> tuple[Tensor, Tensor]:
        """From ``x``, what the mixer reads of the residual stream ``hidden``: the stream after the mixer, and what the
        feed-forward part adds to it, which goes with the next norm.
        """
        ops, eps = self._ops, self.config.norm_eps
        mixed = self._norm(self._sum(self._mix(x, spec, w, at)), w.after_mixer)
        x, hidden = ops.add_norm(hidden, mixed, w.before_feed_forward, eps)
        if isinstance(w.feed_forward, MLPWeights):
            assert isinstance(spec.feed_forward, MLPSpec)
            out = mlp(x, spec.feed_forward, w.feed_forward, self._kernels)
        else:
            assert not isinstance(spec.feed_forward, MLPSpec)
            out = experts(x, spec.feed_forward, w.feed_forward, self._kernels)
        return hidden, self._norm(self._sum(out), w.after_feed_forward)

    def _mix(self, x: Tensor, spec: LayerSpec, w: LayerWeights, at: Position) -> Tensor:
        if isinstance(w.mixer, LatentWeights):
            assert isinstance(spec.mixer, LatentSpec)
            return latent_attention(x, spec.mixer, w.mixer, at)
        assert isinstance(spec.mixer, AttentionSpec)
        return attention(x, spec.mixer, w.mixer, at, self.config.norm_eps, self._group)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._ops.norm(x, weight, self.config.norm_eps)

    # ---- tensor parallelism (the scheme of Megatron-LM, arXiv:1909.08053) -------------------------

    def _embed(self, tokens: Tensor) -> Tensor:
        """Each rank embeds the tokens of its part of the vocabulary, and zeros for the others."""
        table, scale = self.weights.embedding, self._embedding_scale
        if self._group is None:
            return self._ops.embed(tokens, table, None, scale)
        part = self._group.shard.of(self.config.vocab_size)
        return self._group.all_reduce(self._ops.embed(tokens, table, part, scale))

    def _sum(self, part: Tensor) -> Tensor:
        """The whole product of a row-parallel projection. Only rank 0 adds its bias."""
        return part if self._group is None else self._group.all_reduce(part.contiguous())

    def _gathered(self, logits: Tensor) -> Tensor:
        if self._group is None:
            return logits
        parts = self._group.gather(logits.contiguous())
        return logits if parts is None else torch.cat(parts, dim=-1)[:, : self.config.vocab_size]
