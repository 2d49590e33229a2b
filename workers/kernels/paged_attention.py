"""Attention over page tables: the reference that defines it, and the torch implementation that the engine runs.

A batch is a concatenation of sequences. Sequence ``i`` has ``query_lens[i]`` new tokens at the end of its
``context_lens[i]`` tokens, and its page table is row ``i`` of ``tables``::

    context  |. . . . . . . . . . . . . . .|
              [0, context - query) cached
                                 [context - query, context) the queries; their KV is written already
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> Tensor:
    """Causal attention of each query over its sequence's pages, in fp32, one position at a time.

    ``q [tokens, heads, head_dim]``; ``k_pages, v_pages [pages, kv_heads, page_size, head_dim]``;
    ``tables [sequences, max_pages]``. Returns ``[tokens, heads, head_dim]`` in q's dtype.
    """
    out = torch.empty_like(q)
    page_size, group = k_pages.shape[2], q.shape[1] // k_pages.shape[1]
    start = 0
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        for i in range(query_len):
            visible = context_len - query_len + i + 1
            slots = [(int(tables[row, p // page_size]), p % page_size) for p in range(visible)]
            k = torch.stack([k_pages[page, :, offset] for page, offset in slots]).float()
            v = torch.stack([v_pages[page, :, offset] for page, offset in slots]).float()
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,nhd->hn", q[start + i].float(), k) * scale
            out[start + i] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v).to(q.dtype)
        start += query_len
    return out


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share, computed once."""

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    as_one_batch: bool
    """Every sequence has one query, and the lengths are close enough to pad to the longest."""
    masks: Sequence[Tensor | None]
    """One for the batch, or one a sequence. None where nothing is masked, or where the whole context is new
    and causal attention applies."""


def plan_attention(
    query_lens: Sequence[int], context_lens: Sequence[int], group: int, dtype: torch.dtype, device: torch.device
) -> AttentionPlan:
    """The plan for a batch. ``group``: query heads per KV head."""
    num, longest = len(query_lens), max(context_lens)
    # Padding reads unneeded KV; a call for each sequence has overhead.
    if num > 1 and max(query_lens) == 1 and longest * num <= 2 * sum(context_lens):
        mask = None
        if min(context_lens) != longest:
            lens = torch.tensor(context_lens, device=device)
            mask = (torch.arange(longest, device=device)[None, :] < lens[:, None])[:, None, None, :]
        return AttentionPlan(query_lens, context_lens, True, [mask])
    masks = [
        _extend_mask(query_len, context_len, group, dtype, device) if 1 < query_len < context_len else None
        for query_len, context_len in zip(query_lens, context_lens, strict=True)
    ]
    return AttentionPlan(query_lens, context_lens, False, masks)


def _extend_mask(query_len: int, context_len: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask ``[group * query_len, context_len]``: query i attends to positions up to its own."""
    mask = torch.zeros(query_len, context_len, dtype=dtype, device=device)
    hidden = torch.ones(query_len, query_len, dtype=torch.bool, device=device).triu(1)
    mask[:, context_len - query_len :].masked_fill_(hidden, -torch.inf)
    return mask.repeat(group, 1)


def paged_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    """``paged_attention_reference`` with gathered pages and fused attention."""
    if plan.as_one_batch:
        return _decode_batch(q, k_pages, v_pages, tables, plan, scale)
    out, start = torch.empty_like(q), 0
    for row, query_len in enumerate(plan.query_lens):
        end, context_len = start + query_len, plan.context_lens[row]
        out[start:end] = _one_sequence(q[start:end], k_pages, v_pages, tables[row], context_len, plan.masks[row], scale)
        start = end
    return out


def _gather(pages: Tensor, table: Tensor) -> Tensor:
    """A sequence's pages, ``table [..., n]``, as ``[..., kv_heads, n * page_size, head_dim]``.

    Each head's part of a page is gathered as one flat row, which torch copies as a block: several times
    faster on CPU.
    """
    num_pages, kv_heads, page_size, head_dim = pages.shape
    rows = table[..., None, :] * kv_heads + torch.arange(kv_heads, device=table.device, dtype=table.dtype)[:, None]
    picked = pages.view(num_pages * kv_heads, -1).index_select(0, rows.reshape(-1))
    return picked.view(*rows.shape[:-1], rows.shape[-1] * page_size, head_dim)


def _one_sequence(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, context_len: int, mask: Tensor | None, scale: float
) -> Tensor:
    query_len, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1], k_pages.shape[2]
    group = heads // kv_heads
    table = table[: -(-context_len // page_size)]
    k = _gather(k_pages, table)[:, :context_len]
    v = _gather(v_pages, table)[:, :context_len]
    if mask is None and query_len > 1:
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        out = scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], is_causal=True, scale=scale)
        return out[0].transpose(0, 1)
    # Heads that share a KV head become more queries of it, without a copy of K and V for each head.
    grouped = q.view(query_len, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    grouped = grouped.reshape(1, kv_heads, group * query_len, head_dim)
    out = scaled_dot_product_attention(grouped, k[None], v[None], attn_mask=mask, scale=scale)
    return out.view(kv_heads, group, query_len, head_dim).permute(2, 0, 1, 3).reshape(query_len, heads, head_dim)


def _decode_batch(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, plan: AttentionPlan, scale: float
) -> Tensor:
    batch, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[1], k_pages.shape[2]
    longest = max(plan.context_lens)
    tables = tables[:, : -(-longest // page_size)]
    k = _gather(k_pages, tables)[:, :, :longest]
    v = _gather(v_pages, tables)[:, :, :longest]
    grouped = q.view(batch, kv_heads, heads // kv_heads, head_dim)
    out = scaled_dot_product_attention(grouped, k, v, attn_mask=plan.masks[0], scale=scale)
    return out.reshape(batch, heads, head_dim)
