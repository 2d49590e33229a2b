"""Launches the Triton kernels of attention: the same plan and call as the torch implementation."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from workers.kernels.fp8 import stored
from workers.kernels.paged_attention import HeadShape
from workers.kernels.tiles import BY_RULE, AttentionShape, AttentionTiles, Blocks, Tiles
from workers.kernels.triton_attention import decode_kernel, extend_kernel, sum_kernel
from workers.kernels.upload import upload_parts

MAX_PROGRAMS = 65_536
"""Of a launch for contexts of any length, most of which find no split to compute: they take less time than the few that
run side by side save."""


def constants(
    blocks: Blocks,
    *,
    heads: int,
    group: int,
    k_dim: int,
    v_dim: int,
    page_size: int,
    window: int,
    softcap: bool,
    sinks: bool,
    latent: bool,
) -> dict[str, int | bool]:
    """What the kernels are compiled for."""
    block_v = max(16, triton.next_power_of_2(v_dim))
    return {
        "HEADS": heads,
        "GROUP": group,
        "PAGE": page_size,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "BLOCK_D": block_v if latent else max(16, triton.next_power_of_2(k_dim)),
        "BLOCK_V": block_v,
        "BLOCK_R": max(16, triton.next_power_of_2(k_dim - v_dim)) if latent else 16,
        "BLOCK_M": blocks.rows,
        "PART_ROWS": min(group, blocks.rows),  # of a decode, which has one query
        "BLOCK_N": blocks.block_n,
        "SPLIT": blocks.split,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "SINKS": sinks,
        "LATENT": latent,
    }


def _options(blocks: Blocks) -> dict[str, int | bool]:
    # Whether a product and a sum are fused must not be the compiler's choice, kernel by kernel.
    return {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages, "enable_fp_fusion": False}


def _of(kernel: Any, known: dict[str, int | bool]) -> dict[str, int | bool]:
    return {name: value for name, value in known.items() if name in kernel.arg_names}


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """What all layers of a KV group share in a step, on the device."""

    tables: Tensor
    """int32 ``[sequences, max_pages]``"""
    spans: Tensor
    """int32 ``[sequences, 3]``: its first query in the batch, its queries, its context."""
    side_by_side: Tensor
    """int32 ``[tiles, 2]``: the sequence and first row of each tile whose splits are programs of their own."""
    one_by_one: Tensor
    """int32 ``[tiles, 2]``: the others."""
    num_splits: int
    """The most splits of a tile of the first kind."""
    page_size: int
    group: int
    window: int
    blocks: AttentionTiles

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
        q, k_dim = q.contiguous(), q.shape[-1]
        latent = v_pages is None
        values = stored(k_pages if v_pages is None else v_pages)
        k_pages = stored(k_pages)
        v_dim = v_dim if latent else values.shape[-1]
        heads, kv_heads = q.shape[1], k_pages.shape[1]
        out = q.new_empty(q.shape[0], heads, v_dim)
        shape = partial(
            constants,
            heads=heads,
            group=self.group,
            k_dim=k_dim,
            v_dim=v_dim,
            page_size=self.page_size,
            window=self.window,
            softcap=softcap > 0,
            sinks=sinks is not None,
            latent=latent,
        )
        strides = (self.tables.stride(0), *k_pages.stride()[:2], *values.stride()[:2])
        read = (q, k_pages, values, self.tables)
        given_sinks = q if sinks is None else sinks
        if len(self.one_by_one):
            extend_kernel[len(self.one_by_one), kv_heads](
                out, *read, self.one_by_one, self.spans, given_sinks, scale, softcap, *strides,
                **_of(extend_kernel, shape(self.blocks.extend)), **_options(self.blocks.extend),
            )  # fmt: skip
        if len(self.side_by_side):
            blocks = self.blocks.decode
            known, options = shape(blocks), _options(blocks)
            num_parts = len(self.side_by_side) * kv_heads * self.num_splits * min(self.group, blocks.rows)
            part_values = torch.empty(num_parts * v_dim, dtype=torch.float32, device=q.device)
            part_sums = torch.empty(num_parts * 2, dtype=torch.float32, device=q.device)
            decode_kernel[len(self.side_by_side), kv_heads, self.num_splits](
                part_values, part_sums, *read, self.side_by_side, self.spans, scale, softcap, *strides,
                **_of(decode_kernel, known), **options,
            )  # fmt: skip
            sum_kernel[len(self.side_by_side), kv_heads](
                out, part_values, part_sums, self.side_by_side, self.spans, given_sinks, self.num_splits,
                **_of(sum_kernel, known), **options,
            )  # fmt: skip
        return out if v_scale == 1.0 else out * v_scale


def plan_triton_attention(
    tables: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    page_size: int,
    *,
    heads: HeadShape,
    dtype: torch.dtype,
    window: int = 0,
    tiles: Tiles = BY_RULE,
) -> TritonPlan:
    """The plan for a batch: as ``plan_attention``. One copy to the device, whatever the batch."""
    shape, group = AttentionShape(heads, page_size, window, dtype), heads.group
    blocks = tiles.attention(shape, tables.device)
    split = blocks.extend.split
    # By whole arrays: a loop over a large batch takes longer than all else that a step's launch costs the host.
    queries, contexts = np.asarray(query_lens, dtype=np.int32), np.asarray(context_lens, dtype=np.int32)
    spans = np.empty((len(queries), 3), dtype=np.int32)
    spans[:, 0], spans[:, 1], spans[:, 2] = np.cumsum(queries) - queries, queries, contexts
    first_splits = np.maximum(0, contexts - window) // split if window else 0
    splits = (contexts - 1) // split + 1 - first_splits
    apart = (queries == 1) & (splits > 1)
    num_splits = int(splits.max(initial=0, where=apart))
    side_by_side = _tiles(np.flatnonzero(apart), queries * group, blocks.decode.rows)
    one_by_one = _tiles(np.flatnonzero(~apart), queries * group, blocks.extend.rows)
    parts = upload_parts([array("i", part.tobytes()) for part in (spans, side_by_side, one_by_one)], tables.device)
    spans_, side, one = parts[0].view(-1, 3), parts[1].view(-1, 2), parts[2].view(-1, 2)
    return TritonPlan(tables, spans_, side, one, num_splits, page_size, group, window, blocks)


def _tiles(sequences: NDArray[np.int64], num_rows: NDArray[np.int32], height: int) -> NDArray[np.int32]:
    """The tiles of some sequences, in order: int32 ``[tiles, 2]``, each one's sequence and first row."""
    counts = -(-num_rows[sequences] // height)
    tiles = np.zeros((int(counts.sum()), 2), dtype=np.int32)
    if len(tiles) == len(sequences):  # as of decodes
        tiles[:, 0] = sequences
        return tiles
    before = np.repeat(np.cumsum(counts) - counts, counts)
    tiles[:, 0], tiles[:, 1] = np.repeat(sequences, counts), (np.arange(len(before)) - before) * height
    return tiles


def plan_triton_decodes(
    tables: Tensor,
    context_lens: Tensor,
    page_size: int,
    *,
    heads: HeadShape,
    dtype: torch.dtype,
    kv_heads: int,
    most: int,
    window: int = 0,
    tiles: Tiles = BY_RULE,
) -> TritonPlan:
    """See ``DecodePlanner``. The bits are those of ``plan_triton_attention``."""
    device = tables.device
    blocks = tiles.attention(AttentionShape(heads, page_size, window, dtype), device)
    sequence = torch.arange(len(tables), dtype=torch.int32, device=device)
    spans = torch.stack((sequence, torch.ones_like(sequence), context_lens.int()), dim=1)
    num_splits = -(-most // blocks.decode.split)
    if window:
        num_splits = min(num_splits, -(-window // blocks.decode.split) + 1)
    num_tiles = len(tables) * -(-heads.group // blocks.decode.rows)
    apart = 1 < num_splits <= MAX_PROGRAMS // (num_tiles * kv_heads)
    height = (blocks.decode if apart else blocks.extend).rows
    rows = torch.arange(0, heads.group, height, dtype=torch.int32, device=device)
    every = torch.stack((sequence.repeat_interleave(len(rows)), rows.repeat(len(tables))), dim=1)
    none = every.narrow(0, 0, 0)
    side, one = (every, none) if apart else (none, every)
    return TritonPlan(tables, spans, side, one, num_splits, page_size, heads.group, window, blocks)
