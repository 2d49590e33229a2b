"""Attention over page tables in Triton: one algorithm for decodes and extends, with a fixed order of reduction.

The rows of a sequence are its (query, head) pairs that share a KV head, in tiles of ``BLOCK_M``. A row's positions are
read in blocks of ``BLOCK_N``, and the blocks of each ``SPLIT`` positions are summed apart, then the splits in order::

    positions |----block----|----block----|----block----|----block----|----...
              |          split 0          |          split 1          |
    row             m, l, acc of split 0  +       of split 1          + ...

Blocks and splits begin at multiples of their sizes, whatever the batch or the chunk. What a row does not attend to
adds nothing, not even a rounding. So the result for a row is the same, bit for bit, alone, in a batch, as a decode or
in a chunk of any size (law L14). A decode's splits run side by side, as in Flash-Decoding
(https://crfm.stanford.edu/2023/10/12/flashdecoding.html), and a second kernel sums them; an extend's tile runs them
one after another, as in FlashAttention-2 (arXiv:2307.08691), with the same sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workers.kernels.triton_fp8 import as_read


@triton.jit
def _split_sums(
    q,
    q_rest,
    k_pages,
    v_pages,
    table,
    row_position,
    first,
    start,
    end,
    scale,
    softcap,
    k_page_stride,
    v_page_stride,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Maximum, sum and weighted values of the positions ``[start, end)``; none before ``first`` is read."""
    d, v_d = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for block in range(start, end, BLOCK_N):
        position = block + tl.arange(0, BLOCK_N)
        held = (position >= first) & (position < end)
        page = tl.load(table + position // PAGE, mask=held, other=0).to(tl.int64)
        offset = position % PAGE
        k_at = page * k_page_stride + offset * K_DIM
        k = tl.load(
            k_pages + k_at[None, :] + d[:, None],
            mask=held[None, :] & (d < V_DIM if LATENT else d < K_DIM)[:, None],
            other=0.0,
        )
        k = as_read(k, q)
        scores = tl.dot(q, k, input_precision="ieee")
        if LATENT:  # the key is the value, and then the rotated part
            r = tl.arange(0, BLOCK_R)
            rest = tl.load(
                k_pages + k_at[None, :] + V_DIM + r[:, None],
                mask=held[None, :] & (r < K_DIM - V_DIM)[:, None],
                other=0.0,
            )
            scores += tl.dot(q_rest, as_read(rest, q), input_precision="ieee")
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            capped = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634 * scale / softcap)) + 1.0)
            scores = capped * (softcap * 1.4426950408889634)
        else:
            scores = scores * (scale * 1.4426950408889634)
        attended = held[None, :] & (position[None, :] <= row_position[:, None])
        if WINDOW > 0:
            attended &= position[None, :] > row_position[:, None] - WINDOW
        scores = tl.where(attended, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        reference = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(highest - reference)
        total = total * shrink + tl.sum(weights, 1)
        if LATENT:
            v = tl.trans(k)
        else:
            v_at = page * v_page_stride + offset * V_DIM
            v = tl.load(v_pages + v_at[:, None] + v_d[None, :], mask=held[:, None] & (v_d < V_DIM)[None, :], other=0.0)
        values = values * shrink[:, None] + tl.dot(weights.to(q.dtype), as_read(v, q), input_precision="ieee")
        highest = higher
    return highest, total, values


@triton.jit
def _add_split(highest, total, values, new_highest, new_total, new_values):
    """Sums over some splits, and one more."""
    higher = tl.maximum(highest, new_highest)
    reference = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, new_shrink = tl.exp2(highest - reference), tl.exp2(new_highest - reference)
    total = total * shrink + new_total * new_shrink
    values = values * shrink[:, None] + new_values * new_shrink[:, None]
    return higher, total, values


@triton.jit
def _store_rows(
    out,
    highest,
    total,
    values,
    sinks,
    row,
    head,
    in_tile,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SINKS: tl.constexpr,
):
    if SINKS:  # a score without a value
        sink = tl.load(sinks + head, mask=in_tile, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.exp2(sink - higher)
        values = values * shrink[:, None]
    result = values / tl.where(total == 0.0, 1.0, total)[:, None]
    v_d = tl.arange(0, BLOCK_V)
    at = (row.to(tl.int64) * HEADS + head)[:, None] * V_DIM + v_d[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=in_tile[:, None] & (v_d < V_DIM)[None, :])


@triton.jit
def _tile_rows(tiles, spans, tile, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's sequence, its rows' queries (in the batch and in the context), heads, and which rows there are."""
    sequence = tl.load(tiles + 2 * tile)
    row = tl.load(tiles + 2 * tile + 1) + tl.arange(0, BLOCK_M)
    first_query = tl.load(spans + 3 * sequence)
    num_queries = tl.load(spans + 3 * sequence + 1)
    context_len = tl.load(spans + 3 * sequence + 2)
    query = tl.minimum(row // GROUP, num_queries - 1)
    return (
        sequence,
        first_query + query,
        context_len - num_queries + query,
        kv_head * GROUP + row % GROUP,
        row < num_queries * GROUP,
    )


@triton.jit
def _load_queries(
    q,
    row,
    head,
    in_tile,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    d = tl.arange(0, BLOCK)
    at = (row.to(tl.int64) * HEADS + head)[:, None] * K_DIM + FROM + d[None, :]
    return tl.load(q + at, mask=in_tile[:, None] & (d < TO - FROM)[None, :], other=0.0)


@triton.jit
def extend_kernel(
    out,
    q,
    k_pages,
    v_pages,
    tables,
    tiles,
    spans,
    sinks,
    scale,
    softcap,
    table_stride,
    k_page_stride,
    k_head_stride,
    v_page_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Program (tile, KV head): all of its rows' positions."""
    kv_head = tl.program_id(1)
    sequence, row, position, head, in_tile = _tile_rows(tiles, spans, tl.program_id(0), kv_head, GROUP, BLOCK_M)
    queries = _load_queries(q, row, head, in_tile, HEADS, K_DIM, 0, V_DIM if LATENT else K_DIM, BLOCK_D)
    rest = queries
    if LATENT:
        rest = _load_queries(q, row, head, in_tile, HEADS, K_DIM, V_DIM, K_DIM, BLOCK_R)
    first, end = 0, tl.max(position, 0) + 1
    if WINDOW > 0:
        first = tl.maximum(0, tl.min(position, 0) - WINDOW + 1)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for split in range(first // SPLIT * SPLIT, end, SPLIT):
        start = tl.maximum(split, first // BLOCK_N * BLOCK_N)
        new_highest, new_total, new_values = _split_sums(
            queries, rest, k_pages + kv_head * k_head_stride, v_pages + kv_head * v_head_stride,
            tables + sequence * table_stride, position, first, start, tl.minimum(split + SPLIT, end), scale, softcap,
            k_page_stride, v_page_stride,
            PAGE, K_DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_R, BLOCK_M, BLOCK_N, WINDOW, SOFTCAP, LATENT,
        )  # fmt: skip
        highest, total, values = _add_split(highest, total, values, new_highest, new_total, new_values)
    _store_rows(out, highest, total, values, sinks, row, head, in_tile, HEADS, V_DIM, BLOCK_V, SINKS)


@triton.jit
def decode_kernel(
    part_values,
    part_sums,
    q,
    k_pages,
    v_pages,
    tables,
    tiles,
    spans,
    scale,
    softcap,
    table_stride,
    k_page_stride,
    k_head_stride,
    v_page_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PART_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LATENT: tl.constexpr,
):
    """Program (tile, KV head, n): the n-th split that the tile's rows attend to, if there is one."""
    tile, kv_head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, row, position, head, in_tile = _tile_rows(tiles, spans, tile, kv_head, GROUP, BLOCK_M)
    first, end = 0, tl.max(position, 0) + 1
    if WINDOW > 0:
        first = tl.maximum(0, tl.min(position, 0) - WINDOW + 1)
    split = (first // SPLIT + number) * SPLIT
    if split < end:
        queries = _load_queries(q, row, head, in_tile, HEADS, K_DIM, 0, V_DIM if LATENT else K_DIM, BLOCK_D)
        rest = queries
        if LATENT:
            rest = _load_queries(q, row, head, in_tile, HEADS, K_DIM, V_DIM, K_DIM, BLOCK_R)
        start = tl.maximum(split, first // BLOCK_N * BLOCK_N)
        highest, total, values = _split_sums(
            queries, rest, k_pages + kv_head * k_head_stride, v_pages + kv_head * v_head_stride,
            tables + sequence * table_stride, position, first, start, tl.minimum(split + SPLIT, end), scale, softcap,
            k_page_stride, v_page_stride,
            PAGE, K_DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_R, BLOCK_M, BLOCK_N, WINDOW, SOFTCAP, LATENT,
        )  # fmt: skip
        part = ((tile * tl.num_programs(1) + kv_head) * tl.num_programs(2) + number).to(tl.int64)
        part = part * PART_ROWS + tl.arange(0, BLOCK_M)
        tl.store(part_sums + 2 * part, highest, mask=in_tile)
        tl.store(part_sums + 2 * part + 1, total, mask=in_tile)
        v_d = tl.arange(0, BLOCK_V)
        tl.store(
            part_values + part[:, None] * V_DIM + v_d[None, :], values, mask=in_tile[:, None] & (v_d < V_DIM)[None, :]
        )


@triton.jit
def sum_kernel(
    out,
    part_values,
    part_sums,
    tiles,
    spans,
    sinks,
    num_splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PART_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Program (tile, KV head): the sum of what ``decode_kernel`` left of its splits."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    _, row, position, head, in_tile = _tile_rows(tiles, spans, tile, kv_head, GROUP, BLOCK_M)
    first, end = 0, tl.max(position, 0) + 1
    if WINDOW > 0:
        first = tl.maximum(0, tl.min(position, 0) - WINDOW + 1)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    values = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    v_d = tl.arange(0, BLOCK_V)
    for number in range(0, (end - 1) // SPLIT - first // SPLIT + 1):
        part = ((tile * tl.num_programs(1) + kv_head) * num_splits + number).to(tl.int64)
        part = part * PART_ROWS + tl.arange(0, BLOCK_M)
        new_highest = tl.load(part_sums + 2 * part, mask=in_tile, other=float("-inf"))
        new_total = tl.load(part_sums + 2 * part + 1, mask=in_tile, other=0.0)
        new_values = tl.load(
            part_values + part[:, None] * V_DIM + v_d[None, :],
            mask=in_tile[:, None] & (v_d < V_DIM)[None, :],
            other=0.0,
        )
        highest, total, values = _add_split(highest, total, values, new_highest, new_total, new_values)
    _store_rows(out, highest, total, values, sinks, row, head, in_tile, HEADS, V_DIM, BLOCK_V, SINKS)
