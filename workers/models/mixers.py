"""The mixers: grouped-query attention and multi-head latent attention, over page tables."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workers.kernels.attention import AttentionPlan
from workers.kernels.backend import Backend
from workers.kernels.elementwise import Elementwise, HeadNorms, Places, Rotation
from workers.kernels.products import Weight
from workers.models.parallel import RankGroup
from workers.models.spec import AttentionSpec, LatentSpec, QKNorm

LATENT_EPS = 1e-6
"""DeepSeek's norms of the factored projections have no field in the config."""


@dataclass(slots=True)
class GroupBatch:
    """What a step's layers of one KV group share."""

    write_pages: Tensor
    """int64 ``[tokens]``: where each token's KV goes, at ``ForwardBatch.write_offsets``."""
    attention: AttentionPlan


@dataclass(slots=True)
class Position:
    """Where a layer reads and writes: its KV, the step's pages, the rotary embedding; and by what."""

    places: Places
    attention: AttentionPlan
    rotation: Rotation
    kernels: Backend


@dataclass(slots=True)
class AttentionWeights:
    """Projections of the same input are stored as one matrix, for fewer and larger products."""

    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    o: Weight
    o_bias: Tensor | None
    kv_scales: tuple[float, float] = (1.0, 1.0)
    """The checkpoint's, for keys and values in fp8."""


@dataclass(slots=True)
class LatentWeights:
    q_a: Weight | None
    q_a_bias: Tensor | None
    q_a_norm: Tensor | None
    q_b: Weight
    """From the factored or, without ``q_a``, from the whole input."""
    kv_a: Weight
    kv_a_bias: Tensor | None
    kv_a_norm: Tensor
    key: Weight
    """``[heads, kv_rank, nope_dim]``: a head's queries as queries of the latent."""
    value: Weight
    """``[heads, v_dim, kv_rank]``: a head's values from the latent."""
    o: Weight
    o_bias: Tensor | None


def attention(
    x: Tensor, spec: AttentionSpec, w: AttentionWeights, at: Position, eps: float, group: RankGroup | None
) -> Tensor:
    """This rank's share of grouped-query attention ``[tokens, hidden]``, to be summed over the ranks."""
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linear, ops = at.kernels.products.linear, at.kernels.elementwise
    q, k, v = linear(x, w.qkv, w.qkv_bias).split((q_size, kv_size, kv_size), dim=-1)
    if spec.qk_norm is QKNorm.ALL:
        q, k = _norm_all_heads(q, k, w, eps, group, ops)
    q = q.reshape(-1, spec.num_heads, spec.head_dim)
    k = k.reshape(-1, spec.num_kv_heads, spec.head_dim)
    v = v.reshape(-1, spec.num_kv_heads, spec.head_dim)
    norms = None
    if spec.qk_norm is QKNorm.HEAD:
        assert w.q_norm is not None and w.k_norm is not None
        norms = HeadNorms(w.q_norm, w.k_norm, eps)
    q = ops.rotate_and_write(q, k, v, norms, at.rotation, at.places)
    k_pages, v_pages = at.places.k_pages, at.places.v_pages
    k_scale, v_scale = at.places.scales
    out = at.attention.attend(
        q, k_pages, v_pages, spec.scale * k_scale, softcap=spec.softcap, sinks=w.sinks, v_scale=v_scale
    )
    return linear(out.reshape(-1, q_size), w.o, w.o_bias)


def _norm_all_heads(
    q: Tensor, k: Tensor, w: AttentionWeights, eps: float, group: RankGroup | None, ops: Elementwise
) -> tuple[Tensor, Tensor]:
    """RMS norms over the heads of all ranks. Ranks that hold the same KV head count it once each."""
    assert w.q_norm is not None and w.k_norm is not None
    if group is None:
        return ops.norm(q, w.q_norm, eps), ops.norm(k, w.k_norm, eps)
    of_q, of_k = group.all_reduce(ops.mean_squares((q, k))).unbind(1)
    ranks = group.shard.size
    return ops.scaled_norm(q, of_q, ranks, w.q_norm, eps), ops.scaled_norm(k, of_k, ranks, w.k_norm, eps)


def latent_attention(x: Tensor, spec: LatentSpec, w: LatentWeights, at: Position) -> Tensor:
    """This rank's share of latent attention ``[tokens, hidden]``, to be summed over the ranks.

    The projections to keys and values are absorbed into the queries and the output, so that every head
    attends to the latents themselves: a page holds ``kv_rank + rope_dim`` elements a token for all heads.
    """
    products, ops = at.kernels.products, at.kernels.elementwise
    linear = products.linear
    if w.q_a is not None:
        assert w.q_a_norm is not None
        queries = linear(ops.norm(linear(x, w.q_a, w.q_a_bias), w.q_a_norm, LATENT_EPS), w.q_b)
    else:
        queries = linear(x, w.q_b)
    queries = queries.view(-1, spec.num_heads, spec.nope_dim + spec.rope.dim)
    q_nope, q_rope = queries.split((spec.nope_dim, spec.rope.dim), dim=-1)
    latent, k_rope = linear(x, w.kv_a, w.kv_a_bias).split((spec.kv_rank, spec.rope.dim), dim=-1)
    ops.write_latents(latent, w.kv_a_norm, LATENT_EPS, k_rope, at.rotation, at.places)
    q = ops.rotate(q_rope, at.rotation, rest=products.by_head(q_nope, w.key))
    out = at.attention.attend(q, at.places.k_pages, None, spec.scale, v_dim=spec.kv_rank)
    values = products.by_head(out, w.value)
    return linear(values.reshape(-1, spec.num_heads * spec.v_dim), w.o, w.o_bias)
