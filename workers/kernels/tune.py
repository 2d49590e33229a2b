"""Measures the tiles of a GPU's kernels: the fastest of those that give the bits of the tile they replace.

So a table never changes a token, and law L14 needs nothing of an architecture: whether tiles may follow from the number
of rows is found here, by comparing results bit for bit.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.testing import do_bench

from workers.kernels.attention_launch import plan_triton_attention, plan_triton_decodes
from workers.kernels.experts_launch import TritonExperts
from workers.kernels.fp8 import FP8
from workers.kernels.grouped_experts import ExpertProducts
from workers.kernels.packed import GROUP, FP8Weight, MXFP4Weight
from workers.kernels.products import Weight
from workers.kernels.products_launch import TritonProducts
from workers.kernels.tiles import (
    BY_RULE,
    AttentionShape,
    AttentionTiles,
    Blocks,
    ExpertShape,
    ExpertTile,
    ProductShape,
    ProductTile,
    Shape,
    Tile,
    Tiles,
)
from workers.kernels.trial_processes import run_each

log = logging.getLogger("holdfast.kernels")
Candidate: TypeAlias = tuple[Shape, Tile]
ROWS = (16, 64, 256, 1024, 4096)
"""Of a step that tiles are measured for; what has more takes the last one's."""
FEW = 64
CONTEXT, BATCH, CHECKED = 4096, 16, 256
"""Of attention; and the sequences, or tokens, whose bits are compared."""
KV_HEADS, TOP_K = 8, 4
FP8_BLOCK = (128, 128)
GAIN = 0.98
"""A tile that is less than 2 % faster is not."""
PROCESSES = 16
LIMIT_S = 30.0
"""A candidate that was not compiled and run within this time is none."""


class OneTile(Tiles):
    """The same tile whatever the shape."""

    def __init__(self, tile: Tile) -> None:
        super().__init__()
        self._tile: Any = tile

    def attention(self, shape: AttentionShape, device: torch.device) -> AttentionTiles:
        found: AttentionTiles = self._tile
        return found

    def product(self, shape: ProductShape, num_rows: int, device: torch.device) -> ProductTile:
        found: ProductTile = self._tile
        return found

    def experts(self, shape: ExpertShape, num_rows: int, device: torch.device) -> ExpertTile:
        found: ExpertTile = self._tile
        return found


@dataclass(frozen=True, slots=True)
class Trial:
    """One shape with so many rows."""

    rows: int
    rule: Tile
    """What it has without a table."""
    candidates: Sequence[Tile]
    check: Callable[[Tile], Tensor]
    """The result whose bits must not change."""
    run: Callable[[Tile], object]
    """What is measured."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best tile of a trial, and the microseconds with it and with the rule's."""

    shape: Shape
    rows: int
    tile: Tile
    us: float
    rule_us: float


def tune(
    shapes: Iterable[Shape], device: torch.device, kv_dtype: torch.dtype, compiled: Callable[[int, int], None]
) -> Iterator[Found]:
    """Measure the tiles of ``shapes`` on ``device``, which should have nothing else to do.

    ``compiled`` is told how many candidates are compiled, of how many.
    """
    wanted = list(shapes)
    ended = _compile(wanted, device, kv_dtype, compiled)
    for shape in wanted:
        for trial in trials(shape, device, kv_dtype):
            if (shape, trial.rule) in ended:
                yield _best(shape, trial, [tile for tile in trial.candidates if (shape, tile) in ended])


def table_of(found: Iterable[Found]) -> dict[Shape, list[tuple[int, Tile]]]:
    """The best tiles by shape: a product's and experts' by rows, a KV group's for decodes and extends together."""
    table: dict[Shape, list[tuple[int, Tile]]] = {}
    for each in found:
        entries, tile = table.setdefault(each.shape, []), each.tile
        if isinstance(tile, AttentionTiles) and entries:
            decode = entries.pop()[1]
            assert isinstance(decode, AttentionTiles)
            tile = AttentionTiles(decode.decode, tile.extend)
        entries.append((each.rows, tile))
    return table


def _best(shape: Shape, trial: Trial, candidates: Iterable[Tile]) -> Found:
    expected, rule_us = trial.check(trial.rule), _microseconds(trial, trial.rule)
    best, best_us = trial.rule, rule_us
    for tile in candidates:
        result = _checked(trial, tile) if tile != trial.rule else None
        if result is None or not torch.equal(result, expected):
            continue
        if (us := _microseconds(trial, tile)) < best_us * (GAIN if best is trial.rule else 1.0):
            best, best_us = tile, us
    return Found(shape, trial.rows, best, best_us, rule_us)


def _microseconds(trial: Trial, tile: Tile) -> float:
    return 1e3 * float(do_bench(lambda: trial.run(tile), warmup=5, rep=25, return_mode="median"))


def _checked(trial: Trial, tile: Tile) -> Tensor | None:
    """Its result; None if it does not compile, or a multiprocessor has not what it needs."""
    try:
        trial.run(tile)
        return trial.check(tile)
    except TritonError:
        return None


def _compile(
    shapes: list[Shape], device: torch.device, kv_dtype: torch.dtype, compiled: Callable[[int, int], None]
) -> set[Candidate]:
    """Fill Triton's cache, in several processes: compiling takes most of the time, and one of the cores.

    Each candidate runs there once. Returns those that ended: with Triton 3.6 a few of attention's never do.
    """
    candidates = {
        (shape, tile): None
        for shape in shapes
        for trial in trials(shape, device, kv_dtype)
        for tile in (trial.rule, *trial.candidates)
    }
    run = partial(_compile_one, device, kv_dtype)
    ended = run_each(run, candidates, min(PROCESSES, os.cpu_count() or 1), LIMIT_S, compiled)
    for shape, tile in candidates.keys() - ended:
        log.warning("%s hangs or fails with %s, which is not measured", shape, tile)
    return ended


def _compile_one(device: torch.device, kv_dtype: torch.dtype, candidate: Candidate) -> None:
    shape, tile = candidate
    for trial in trials(shape, device, kv_dtype):
        if tile == trial.rule or tile in trial.candidates:
            _checked(trial, tile)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return


def trials(shape: Shape, device: torch.device, kv_dtype: torch.dtype) -> Iterator[Trial]:
    """What is measured of a shape; nothing of one that has no choice."""
    torch.manual_seed(0)
    if isinstance(shape, ProductShape):
        yield from _products(shape, device)
    elif isinstance(shape, ExpertShape):
        yield from _experts(shape, device)
    elif shape.heads.v_dim <= 256:  # larger ones are latents', whose tiles are as large as they can be
        yield from _attention(shape, device, kv_dtype)


def _products(shape: ProductShape, device: torch.device) -> Iterator[Trial]:
    weight = _weight(1, shape.columns, shape.depth, shape.dtype, "fp8" if shape.packed else "plain", device)
    x = torch.randn(max(ROWS), shape.depth, device=device).to(shape.dtype)

    def multiply(tile: Tile, rows: int) -> Tensor:
        out = torch.empty(rows, 1, shape.columns, device=device)
        TritonProducts(OneTile(tile)).multiply(out, x[:rows].unsqueeze(1), weight, None)
        return out

    for rows in ROWS:
        rule = BY_RULE.product(shape, rows, device)
        run = partial(multiply, rows=rows)
        yield Trial(rows, rule, list(product_tiles(rows)), run, run)


def product_tiles(num_rows: int) -> Iterator[ProductTile]:
    """The candidates of a product of so many rows."""
    if num_rows <= FEW:
        for rows, columns, depth, stages in itertools.product((16, 64), (32, 64, 128), (64, 128), (3, 5)):
            if rows <= max(16, num_rows):
                yield ProductTile(columns, rows, depth, 4, stages)
        return
    shapes = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (128, 256, 8), (256, 128, 8))
    for (rows, columns, warps), stages in itertools.product(shapes, (3, 4)):
        yield ProductTile(columns, rows, 64, warps, stages)


def _experts(shape: ExpertShape, device: torch.device) -> Iterator[Trial]:
    sizes = (shape.num_experts, 2 * shape.size, shape.hidden), (shape.num_experts, shape.hidden, shape.size)
    gate_up, down = (_weight(*size, shape.dtype, shape.form, device) for size in sizes)
    w = ExpertProducts(gate_up, None, down, None, first=0, num_experts=shape.num_experts)
    top_k, tokens = min(TOP_K, shape.num_experts), max(ROWS)
    x = torch.randn(tokens, shape.hidden, device=device).to(shape.dtype)
    chosen = torch.rand(tokens, shape.num_experts, device=device).topk(top_k, dim=-1).indices
    weights = torch.rand(tokens, top_k, device=device).to(shape.dtype)

    def run(tile: Tile, tokens: int) -> Tensor:
        return TritonExperts(OneTile(tile)).run(x[:tokens], chosen[:tokens], weights[:tokens], w)

    for tokens in (1, *ROWS):
        rows = tokens * top_k
        yield Trial(
            rows,
            BY_RULE.experts(shape, rows, device),
            list(expert_tiles(tokens, shape.num_experts, shape.form)),
            partial(run, tokens=CHECKED),
            partial(run, tokens=tokens),
        )


def expert_tiles(num_tokens: int, num_experts: int, form: str) -> Iterator[ExpertTile]:
    """The candidates of experts with so many tokens. Of MXFP4 the depth is a plane's."""
    few = num_tokens * TOP_K <= FEW * num_experts
    heights = (16,) if few else (64, 128)
    widths, warps, stages = ((32, 64, 128), (2, 4), (3, 5)) if few else ((64, 128), (4, 8), (2, 3))
    for rows, columns, num_warps, num_stages in itertools.product(heights, widths, warps, stages):
        yield ExpertTile(rows, columns, GROUP if form == "mxfp4" else 64, num_warps, num_stages)


def _attention(shape: AttentionShape, device: torch.device, kv_dtype: torch.dtype) -> Iterator[Trial]:
    """Its tiles are tried in turn, decodes' and then extends': each table has both."""
    dim, pages = shape.heads.v_dim, CONTEXT // shape.page_size
    kv = [torch.randn(BATCH * pages, KV_HEADS, shape.page_size, dim, device=device) for _ in range(2)]
    k, v = (part.to(kv_dtype) for part in kv)
    tables = torch.randperm(BATCH * pages, device=device).view(BATCH, pages).int()
    q = torch.randn(CONTEXT, KV_HEADS * shape.heads.group, dim, device=device).to(shape.dtype)
    rule = BY_RULE.attention(shape, device)
    common: dict[str, Any] = {"heads": shape.heads, "dtype": shape.dtype, "window": shape.window}
    lengths = torch.randint(1, CONTEXT + 1, (CHECKED,), device=device)

    def decode(tile: Tile, rows: Tensor, contexts: Tensor) -> Tensor:
        plan = plan_triton_decodes(
            rows, contexts, shape.page_size, **common, kv_heads=KV_HEADS, most=CONTEXT, tiles=OneTile(tile)
        )
        return plan.attend(q[: len(rows)], k, v, dim**-0.5)

    def extend(tile: Tile) -> Tensor:
        plan = plan_triton_attention(tables[:1], [CONTEXT], [CONTEXT], shape.page_size, **common, tiles=OneTile(tile))
        return plan.attend(q, k, v, dim**-0.5)

    longest = torch.full((BATCH,), CONTEXT, device=device)
    many = tables.repeat(CHECKED // BATCH, 1)
    yield Trial(
        1,
        rule,
        [AttentionTiles(blocks, rule.extend) for blocks in decode_blocks(rule)],
        lambda tile: decode(tile, many, lengths),
        lambda tile: decode(tile, tables, longest),
    )
    yield Trial(CONTEXT, rule, [AttentionTiles(rule.decode, blocks) for blocks in extend_blocks(rule)], extend, extend)


def decode_blocks(rule: AttentionTiles) -> Iterator[Blocks]:
    """The candidates of decodes: what sets the order of sums is the rule's."""
    for (rows, warps), stages in itertools.product(((16, 1), (32, 1), (64, 4)), (2, 3, 4)):
        yield Blocks(rows, rule.decode.block_n, rule.decode.split, warps, stages)


def extend_blocks(rule: AttentionTiles) -> Iterator[Blocks]:
    """The candidates of extends."""
    for (rows, warps), stages in itertools.product(((64, 4), (128, 4), (128, 8)), (2, 3)):
        yield Blocks(rows, rule.extend.block_n, rule.extend.split, warps, stages)


def _weight(matrices: int, rows: int, depth: int, dtype: torch.dtype, form: str, device: torch.device) -> Weight:
    """Any weight, as a kernel reads it."""
    if form == "mxfp4":
        groups = -(-depth // GROUP)
        blocks = torch.randint(0, 256, (matrices, rows, groups, GROUP // 2), device=device, dtype=torch.uint8)
        scales = torch.randint(117, 121, (matrices, rows, groups), device=device, dtype=torch.uint8)
        planes = MXFP4Weight(blocks, scales, depth).planes(device)
        assert planes is not None, "its scales are at most 2"
        return planes
    plain = torch.randn(matrices, rows, depth, device=device) * depth**-0.5
    if form == "fp8":
        blocks_of = [-(-size // block) for size, block in zip((rows, depth), FP8_BLOCK, strict=True)]
        return FP8Weight(plain.to(FP8), torch.ones(matrices, *blocks_of, device=device), FP8_BLOCK)
    weight: Weight = plain.to(dtype)
    return weight
