"""Attention over page tables: the function that defines it, and the torch path that the engine runs.

A batch is a concatenation of sequences. Sequence ``i`` brings ``query_lens[i]`` new tokens at the end
of its ``context_lens[i]`` tokens, and its pages stand in row ``i`` of ``tables``::

    context  |. . . . . . . . . . . . . . .|
              [0, context - query) cached
                                 [context - query, context) the queries, written to the pages already
"""

from __future__ import annotations

from collections.abc import Sequence

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

    ``q [tokens, heads, head_dim]``; ``k_pages, v_pages [pages, page_size, kv_heads, head_dim]``;
    ``tables [sequences, max_pages]``. Returns ``[tokens, heads, head_dim]`` in q's dtype.
    """
    out = torch.empty_like(q)
    page_size, group = k_pages.shape[1], q.shape[1] // k_pages.shape[2]
    start = 0
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        for i in range(query_len):
            visible = context_len - query_len + i + 1
            slots = [(int(tables[row, p // page_size]), p % page_size) for p in range(visible)]
            k = torch.stack([k_pages[page, offset] for page, offset in slots]).float()
            v = torch.stack([v_pages[page, offset] for page, offset in slots]).float()
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,nhd->hn", q[start + i].float(), k) * scale
            out[start + i] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v).to(q.dtype)
        start += query_len
    return out


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> Tensor:
    """The same as ``paged_attention_reference``, by gathered pages and fused attention.

    Decodes (one query each) go as one padded batch when their lengths are close enough for the
    padding to cost less than a call each; longer queries go one sequence at a time.
    """
    num_decodes = len(query_lens) if max(query_lens) == 1 else 0
    if num_decodes > 1 and max(context_lens) * num_decodes <= 2 * sum(context_lens):
        return _decode_batch(q, k_pages, v_pages, tables, context_lens, scale)
    out, start = torch.empty_like(q), 0
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        end = start + query_len
        out[start:end] = _one_sequence(q[start:end], k_pages, v_pages, tables[row], context_len, scale)
        start = end
    return out


def _gather(pages: Tensor, table: Tensor) -> Tensor:
    """Rows of pages as contiguous positions: ``[..., n * page_size, kv_heads, head_dim]``."""
    picked = pages.index_select(0, table.reshape(-1))
    return picked.view(*table.shape[:-1], -1, *pages.shape[2:])


def _one_sequence(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, context_len: int, scale: float) -> Tensor:
    query_len, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    group = heads // kv_heads
    table = table[: -(-context_len // page_size)]
    k = _gather(k_pages, table)[:context_len].transpose(0, 1)  # [kv_heads, context, head_dim]
    v = _gather(v_pages, table)[:context_len].transpose(0, 1)
    if query_len == 1:
        # The heads that share a KV head are its queries: no copy of K and V per head.
        grouped = q.view(1, kv_heads, group, head_dim)
        return scaled_dot_product_attention(grouped, k[None], v[None], scale=scale).view(1, heads, head_dim)
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    mask = None
    if query_len != context_len:
        positions = torch.arange(context_len, device=q.device)
        mask = positions[None, :] <= positions[context_len - query_len :, None]
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0].transpose(0, 1)


def _decode_batch(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, context_lens: Sequence[int], scale: float
) -> Tensor:
    batch, heads, head_dim = q.shape
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    longest = max(context_lens)
    tables = tables[:, : -(-longest // page_size)]
    k = _gather(k_pages, tables)[:, :longest].transpose(1, 2)
    v = _gather(v_pages, tables)[:, :longest].transpose(1, 2)
    mask = None
    if min(context_lens) != longest:
        lens = torch.tensor(context_lens, device=q.device)
        mask = (torch.arange(longest, device=q.device)[None, :] < lens[:, None])[:, None, None, :]
    grouped = q.view(batch, kv_heads, heads // kv_heads, head_dim)
    out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, head_dim)
