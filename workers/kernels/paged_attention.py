"""Attention over page tables: the reference that defines it, and the torch implementation that the engine runs.

A batch is a concatenation of sequences. Sequence ``i`` has ``query_lens[i]`` new tokens at the end of its
``context_lens[i]`` tokens, and its page table is row ``i`` of ``tables``::

    context  |. . . . . . . . . . . . . . .|
              [0, context - query) cached
                                 [context - query, context) the queries; their KV is written already

With a window, entries of the table before the first query's window are not read: their pages may be freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.kernels.fp8 import read, stored


def paged_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each query over its sequence's pages, in fp32, one position at a time.

    ``q [tokens, heads, head_dim]``; ``k_pages [pages, kv_heads, page_size, head_dim]``, ``v_pages`` so too,
    perhaps with another ``head_dim``; ``tables [sequences, max_pages]``; ``window`` tokens are attended to, the
    query's included (0: all); ``sinks [heads]`` are scores without a value. Returns ``[tokens, heads, v_dim]``
    in q's dtype.
    """
    page_size, group = k_pages.shape[2], q.shape[1] // k_pages.shape[1]
    out = q.new_empty(*q.shape[:2], v_pages.shape[-1])
    start = 0
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        for i in range(query_len):
            end = context_len - query_len + i + 1
            positions = range(max(0, end - window) if window else 0, end)
            slots = [(int(tables[row, p // page_size]), p % page_size) for p in positions]
            k = torch.stack([k_pages[page, :, offset].float() for page, offset in slots])
            v = torch.stack([v_pages[page, :, offset].float() for page, offset in slots])
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,nhd->hn", q[start + i].float(), k) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.float()[:, None]), dim=-1)
            weights = scores.softmax(-1)[:, : len(positions)]
            out[start + i] = torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)
        start += query_len
    return out


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What the layers of a KV group have in common."""

    group: int
    """Query heads that share a KV head."""
    v_dim: int
    """Elements of a head's value."""


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """What all layers of a KV group share in a step, computed once. Positions count from the first page read."""

    query_lens: Sequence[int]
    ends: Sequence[int]
    """Each sequence's context."""
    starts: Sequence[int]
    """Each sequence's first position that a query attends to."""
    tables: Sequence[Tensor]
    """Each sequence's pages, or those of all of them, padded to the longest, if they are one batch."""
    as_one_batch: bool
    """Every sequence has one query, and the lengths are close enough to pad to the longest."""
    masks: Sequence[Tensor | None]
    """One for the batch, or one a sequence. None where nothing is masked, or where all is new and causal."""

    def attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor | None,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        v_dim: int = 0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """See ``paged_attention``."""
        out = paged_attention(q, k_pages, v_pages, self, scale, softcap=softcap, sinks=sinks, v_dim=v_dim)
        return out if v_scale == 1.0 else out * v_scale


def plan_attention(
    tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    page_size: int,
    *,
    heads: HeadShape,
    dtype: torch.dtype,
    window: int = 0,
) -> TorchPlan:
    """The plan for a batch. ``tables [sequences, max_pages]``."""
    num, device = len(query_lens), tables.device
    begins = [
        max(0, context_len - query_len - window + 1) if window else 0
        for query_len, context_len in zip(query_lens, context_lens, strict=True)
    ]
    firsts = [begin // page_size for begin in begins]
    starts = [begin % page_size for begin in begins]
    ends = [context_len - first * page_size for context_len, first in zip(context_lens, firsts, strict=True)]
    longest = max(ends)
    # Padding reads unneeded KV; a call for each sequence has overhead.
    if num > 1 and max(query_lens) == 1 and longest * num <= 2 * sum(ends):
        num_columns = -(-longest // page_size)
        batch = tables[:, :num_columns]
        if any(firsts):
            columns = torch.tensor(firsts, device=device)[:, None] + torch.arange(num_columns, device=device)
            batch = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
        mask = None
        if min(ends) != longest or any(starts):
            positions = torch.arange(longest, device=device)[None, :]
            mask = positions < torch.tensor(ends, device=device)[:, None]
            mask &= positions >= torch.tensor(starts, device=device)[:, None]
            mask = mask[:, None, None, :]
        return TorchPlan(query_lens, ends, starts, [batch], True, [mask])
    masks = [
        _extend_mask(query_len, end - start, window, heads.group, dtype, device)
        if query_len > 1 and (query_len < end - start or 0 < window < end - start)
        else None
        for query_len, end, start in zip(query_lens, ends, starts, strict=True)
    ]
    rows = [
        tables[i, first : first - (-end // page_size)] for i, (first, end) in enumerate(zip(firsts, ends, strict=True))
    ]
    return TorchPlan(query_lens, ends, starts, rows, False, masks)


def _extend_mask(
    query_len: int, context_len: int, window: int, group: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Additive mask ``[group * query_len, context_len]``: query i attends to its window's positions up to its own."""
    mask = torch.zeros(query_len, context_len, dtype=dtype, device=device)
    hidden = torch.ones(query_len, query_len, dtype=torch.bool, device=device).triu(1)
    mask[:, context_len - query_len :].masked_fill_(hidden, -torch.inf)
    if 0 < window < context_len:
        passed = torch.ones(query_len, context_len, dtype=torch.bool, device=device)
        mask.masked_fill_(passed.tril(context_len - query_len - window), -torch.inf)
    return mask.repeat(group, 1)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    plan: TorchPlan,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    v_dim: int = 0,
) -> Tensor:
    """``paged_attention_reference`` with gathered pages and fused attention.

    ``v_pages`` None: a position's value is the first ``v_dim`` elements of its key (latent attention).
    """
    heads, kv_heads = q.shape[1], k_pages.shape[1]
    group = heads // kv_heads
    grouped_sinks = None if sinks is None else sinks.float().view(kv_heads, group)

    def gathered(table: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
        k = _gather(k_pages, table, q.dtype)[..., start:end, :]
        return k, k[..., :v_dim] if v_pages is None else _gather(v_pages, table, q.dtype)[..., start:end, :]

    if plan.as_one_batch:
        k, v = gathered(plan.tables[0], 0, max(plan.ends))
        grouped = q.view(q.shape[0], kv_heads, group, -1)
        column = None if grouped_sinks is None else grouped_sinks[None, :, :, None]
        out = _attend(grouped, k, v, plan.masks[0], scale, softcap, column)
        return out.reshape(q.shape[0], heads, v.shape[-1])
    outs, at = [], 0
    for i, query_len in enumerate(plan.query_lens):
        k, v = gathered(plan.tables[i], plan.starts[i], plan.ends[i])
        column = None if grouped_sinks is None else grouped_sinks.repeat_interleave(query_len, dim=1)[None, :, :, None]
        outs.append(_one_sequence(q[at : at + query_len], k[None], v[None], plan.masks[i], scale, softcap, column))
        at += query_len
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _gather(pages: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """A sequence's pages, ``table [..., n]``, as ``[..., kv_heads, n * page_size, head_dim]``; fp8 as ``dtype``.

    Each head's part of a page is gathered as one flat row, which torch copies as a block: several times
    faster on CPU.
    """
    num_pages, kv_heads, page_size, head_dim = pages.shape
    rows = table[..., None, :] * kv_heads + torch.arange(kv_heads, device=table.device, dtype=table.dtype)[:, None]
    kept = stored(pages).view(num_pages * kv_heads, -1).index_select(0, rows.reshape(-1))
    picked = read(kept, pages, dtype)
    return picked.view(*rows.shape[:-1], rows.shape[-1] * page_size, head_dim)


def _one_sequence(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """``q [query, heads, head_dim]``, ``k, v [1, kv_heads, n, dim]``, ``sinks [1, kv_heads, group * query, 1]``."""
    query_len, heads, head_dim = q.shape
    kv_heads, v_dim = k.shape[1], v.shape[-1]
    group = heads // kv_heads
    if mask is None and query_len > 1:
        if not softcap and sinks is None:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            out = scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True, scale=scale)
            return out[0].transpose(0, 1)
        mask = _extend_mask(query_len, query_len, 0, group, q.dtype, q.device)
    # Heads that share a KV head become more queries of it, without a copy of K and V for each head.
    grouped = q.view(query_len, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    grouped = grouped.reshape(1, kv_heads, group * query_len, head_dim)
    out = _attend(grouped, k, v, mask, scale, softcap, sinks)
    return out.view(kv_heads, group, query_len, v_dim).permute(2, 0, 1, 3).reshape(query_len, heads, v_dim)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention of ``q [batch, kv_heads, m, dim]`` over ``k, v [batch, kv_heads, n, dim]``."""
    if not softcap and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.float()
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[-2]]
    return (weights @ v.float()).to(q.dtype)
