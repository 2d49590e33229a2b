"""A Llama-style decoder over page tables, for the families of ``config.FAMILIES``.

The forward pass reads its batch only from tensors and lengths, and its only state is the KV pool. So a
batch of decodes can be captured as a graph, and a rank can run any step of its log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from workers.kernels.paged_attention import AttentionPlan, paged_attention
from workers.models.config import ModelConfig
from workers.models.parallel import RankGroup
from workers.models.rope import apply_rope, rope_table


class KVPool:
    """KV of all layers by page: per layer two tensors ``[num_pages + 1, kv_heads, page_size, head_dim]``.

    Heads come first, so that a head's positions are gathered as whole rows and are contiguous, which
    attention reads 1.4 to 1.8 times faster. Padding rows write to the page past the end, which is never
    read.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_pages + 1, config.num_kv_heads, page_size, config.head_dim)
        self.page_size = page_size
        self.page_bytes = self.page_size_bytes(config, page_size, dtype)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    @staticmethod
    def page_size_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """The size of one page over all layers."""
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        return per_token * page_size * torch.empty((), dtype=dtype).element_size()

    def write(self, layer: int, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Write ``k, v [tokens, kv_heads, head_dim]`` at each token's page and offset."""
        self.k[layer][pages, :, offsets] = k
        self.v[layer][pages, :, offsets] = v

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages ``(source, target)`` in all layers, in order: a target may be a later source."""
        for source, target in copies:
            for pages in (*self.k, *self.v):
                pages[target].copy_(pages[source])

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        """Each page's bytes: ``[2 * layers, kv_heads, page_size, head_dim]``, keys of all layers first."""
        index = torch.tensor(pages, device=self.k[0].device)
        together = torch.stack([part[index] for part in (*self.k, *self.v)], dim=1).cpu()
        return [page.view(torch.uint8).numpy().tobytes() for page in together]

    def write_pages(self, pages: Sequence[int], data: Sequence[bytes]) -> None:
        """Write the result of ``read_pages``, of this rank or of one with the same layout, to these pages."""
        shape = (len(pages), len(self.k) + len(self.v), *self.k[0].shape[1:])
        together = torch.frombuffer(bytearray(b"".join(data)), dtype=self.k[0].dtype).view(shape)
        together = together.to(self.k[0].device)
        index = torch.tensor(pages, device=together.device)
        for i, part in enumerate((*self.k, *self.v)):
            part[index] = together[:, i]


@dataclass(slots=True)
class ForwardBatch:
    """One step's work, one sequence after another (see ``kernels.paged_attention``)."""

    tokens: Tensor
    """int64 ``[tokens]``"""
    positions: Tensor
    """int64 ``[tokens]``"""
    write_pages: Tensor
    write_offsets: Tensor
    """int64 ``[tokens]`` both: where each token's KV goes"""
    tables: Tensor
    """int32 ``[sequences, max_pages]``"""
    attention: AttentionPlan
    logit_rows: Tensor
    """int64 ``[samples]``: which tokens' logits are wanted"""


@dataclass(slots=True)
class LayerWeights:
    """One layer. Projections of the same input are stored as one matrix, for fewer and larger products."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    head: Tensor
    """The embedding, if the two are tied."""


class Decoder:
    """The model: weights, the rope table, and ``forward``."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, context_len: int, group: RankGroup | None = None
    ) -> None:
        """``config`` is this rank's shard (``ModelConfig.shard``), ``group`` the ranks that hold the others."""
        self.config = config
        self._group = group
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        cos, sin = rope_table(config.rope, config.head_dim, context_len)
        self._cos = cos.to(self.device, self.dtype)[:, None, :]
        self._sin = sin.to(self.device, self.dtype)[:, None, :]

    def forward(self, batch: ForwardBatch, kv: KVPool) -> Tensor:
        """Write the batch's KV and return fp32 logits ``[samples, vocab_size]``. For inference mode.

        In a group, rank 0 gets the logits; the others get their own part of the vocabulary.
        """
        eps = self.config.norm_eps
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        hidden = self._embed(batch.tokens)
        for index, layer in enumerate(self.weights.layers):
            normed = rms_norm(hidden, hidden.shape[-1:], layer.input_norm, eps)
            hidden = hidden + self._attention(index, layer, normed, cos, sin, batch, kv)
            normed = rms_norm(hidden, hidden.shape[-1:], layer.post_norm, eps)
            gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            hidden = hidden + self._sum(linear(silu(gate) * up, layer.down, layer.down_bias))
        picked = hidden[batch.logit_rows]
        picked = rms_norm(picked, picked.shape[-1:], self.weights.final_norm, eps)
        return self._gathered(linear(picked, self.weights.head).float())

    # ---- tensor parallelism (the scheme of Megatron-LM, arXiv:1909.08053) -------------------------

    def _embed(self, tokens: Tensor) -> Tensor:
        """Each rank embeds the tokens of its part of the vocabulary, and zeros for the others."""
        if self._group is None:
            return embedding(tokens, self.weights.embedding)
        start, end = self._group.shard.of(self.config.vocab_size)
        mine = (tokens >= start) & (tokens < end)
        rows = embedding((tokens - start).clamp(0, max(0, end - start - 1)), self.weights.embedding)
        return self._group.all_reduce(rows * mine[:, None])

    def _sum(self, part: Tensor) -> Tensor:
        """The whole product of a row-parallel projection. Only rank 0 adds its bias."""
        return part if self._group is None else self._group.all_reduce(part)

    def _gathered(self, logits: Tensor) -> Tensor:
        if self._group is None:
            return logits
        parts = self._group.gather(logits.contiguous())
        return logits if parts is None else torch.cat(parts, dim=-1)[:, : self.config.vocab_size]

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, kv: KVPool
    ) -> Tensor:
        c = self.config
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        q, k, v = linear(x, layer.qkv, layer.qkv_bias).split((q_size, kv_size, kv_size), dim=-1)
        q = q.reshape(-1, c.num_heads, c.head_dim)
        k = k.reshape(-1, c.num_kv_heads, c.head_dim)
        v = v.reshape(-1, c.num_kv_heads, c.head_dim)
        if layer.q_norm is not None:
            q = rms_norm(q, q.shape[-1:], layer.q_norm, c.norm_eps)
            k = rms_norm(k, k.shape[-1:], layer.k_norm, c.norm_eps)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        kv.write(index, batch.write_pages, batch.write_offsets, k, v)
        out = paged_attention(q, kv.k[index], kv.v[index], batch.tables, batch.attention, c.head_dim**-0.5)
        return self._sum(linear(out.reshape(-1, q_size), layer.o, layer.o_bias))
