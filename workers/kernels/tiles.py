"""The tiles of a GPU's kernels.

Tiles follow from the shape of a weight or of a head. On Hopper they follow from the number of rows too, because there
a row has the same bits, in fp32, in every tile that was tried (``tests/gpu/test_tiles.py``, on an H100): its tensor
cores add up a row's products in the order of the depth, whatever the instruction's shape. In attention this holds for
tiles that read and add up as many positions at a time (``Blocks.block_n``, ``split``), and where one warp has all of a
row's scores, which it adds up: at most as many warps as a tile has 16 rows. Of other architectures this is not known,
so there nothing follows from the batch (law L14).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from workers.kernels.paged_attention import HeadShape

MIN_PRODUCT_TILES = 96
"""A product of few rows is as fast as its weights are read, which takes most of a GPU's multiprocessors."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The tile of attention."""

    rows: int
    block_n: int
    split: int
    """Positions that are summed apart: few enough that one long sequence fills a device, and enough that the partial
    sums are a small part of the KV."""
    num_warps: int = 8
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Of decodes whose splits are programs of their own, and of all else."""

    decode: Blocks
    extend: Blocks


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The tile of a matrix product."""

    columns: int
    rows: int = 64
    depth: int = 64
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """The tile of both products of experts."""

    rows: int = 64
    columns: int = 64
    depth: int = 64
    """Of MXFP4 it is a plane's."""
    num_warps: int = 8
    num_stages: int = 2


@dataclass(frozen=True, slots=True)
class ProductShape:
    """What a product's tile depends on, beside the number of rows."""

    columns: int
    depth: int
    dtype: torch.dtype
    packed: bool = False
    """In FP8 blocks."""


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """What the tile of a layer's experts depends on, beside the number of rows."""

    num_experts: int
    """Of all ranks, as the rows are."""
    hidden: int
    size: int
    dtype: torch.dtype
    form: str = "plain"
    """``plain``, ``fp8`` (blocks) or ``mxfp4``"""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the tiles of a KV group depend on."""

    heads: HeadShape
    page_size: int
    window: int
    dtype: torch.dtype


Shape: TypeAlias = ProductShape | ExpertShape | AttentionShape
Tile: TypeAlias = ProductTile | ExpertTile | AttentionTiles
Measured: TypeAlias = Mapping[Shape, Sequence[tuple[int, Tile]]]
"""Each shape's tiles, each for at most so many rows; the last for more too."""


class Tiles:
    """The tiles of an engine's kernels: those that were measured (``tile_table``), else by the rules below."""

    def __init__(self, measured: Measured | None = None) -> None:
        self._measured = measured or {}

    def attention(self, shape: AttentionShape, device: torch.device) -> AttentionTiles:
        found = self.find(shape, 1)
        if isinstance(found, AttentionTiles):
            return found
        return attention_tiles(shape.heads.v_dim, is_hopper(device, shape.dtype))

    def product(self, shape: ProductShape, num_rows: int, device: torch.device) -> ProductTile:
        found = self.find(shape, num_rows)
        if isinstance(found, ProductTile):
            return found
        return product_tile(shape.columns, num_rows, not shape.packed and is_hopper(device, shape.dtype))

    def experts(self, shape: ExpertShape, num_rows: int, device: torch.device) -> ExpertTile:
        """``num_rows``: of all experts together."""
        found = self.find(shape, num_rows)
        if isinstance(found, ExpertTile):
            return found
        hopper = shape.form != "fp8" and is_hopper(device, shape.dtype)
        return expert_tile(num_rows, shape.num_experts, shape.form == "mxfp4", hopper)

    def find(self, shape: Shape, num_rows: int) -> Tile | None:
        """What was measured; None: nothing was."""
        known = self._measured.get(shape) if self._measured else None
        if not known:
            return None
        return next((tile for most, tile in known if num_rows <= most), known[-1][1])


BY_RULE = Tiles()
HOPPER_PRODUCTS = (
    ProductTile(256, 128, 64, num_warps=8, num_stages=4),
    ProductTile(128, 128, 64, num_warps=8, num_stages=3),
    ProductTile(64, 64, 128, num_stages=5),
    ProductTile(32, 64, 128, num_stages=5),
    ProductTile(64, 16, 128, num_stages=5),
    ProductTile(32, 16, 128, num_stages=5),
)
"""The fastest on an H100, from many rows to few."""


def is_hopper(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tiles may follow from the number of rows: on Hopper, of what its tensor cores multiply."""
    return device.type == "cuda" and dtype.itemsize == 2 and _capability(device) == (9, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def attention_tiles(v_dim: int, hopper: bool) -> AttentionTiles:
    """The largest that no compiler spills (docs/kernels.md), with two stages in 64 KB, which every device has.

    A decode leaves most of 64 rows empty, which costs nothing that its reading of the KV does not hide.
    """
    width = _power_of_two(v_dim)
    if hopper and width <= 64:
        return AttentionTiles(Blocks(16, 64, 512, num_warps=1, num_stages=3), Blocks(64, 64, 512, num_warps=4))
    if hopper and width <= 128:
        return AttentionTiles(Blocks(64, 64, 512, num_warps=4, num_stages=3), Blocks(128, 64, 512, num_warps=8))
    if width <= 64:
        blocks = Blocks(64, 64, 512)
    elif width <= 128:
        blocks = Blocks(64, 32, 512)
    else:
        blocks = Blocks(32, 32, 512) if width <= 256 else Blocks(16, 16, 1024)
    return AttentionTiles(blocks, blocks)


def product_tile(num_columns: int, num_rows: int, hopper: bool) -> ProductTile:
    """The widest tile that leaves enough of them; 32 columns for small weights."""
    if hopper:
        most = max(16, _power_of_two(num_rows))
        fitting = [tile for tile in HOPPER_PRODUCTS if tile.rows <= most]
        return next(
            (tile for tile in fitting if _num_tiles(tile, num_columns, num_rows) >= MIN_PRODUCT_TILES), fitting[-1]
        )
    for columns in (128, 64):
        if num_columns >= columns * MIN_PRODUCT_TILES:
            return ProductTile(columns)
    return ProductTile(32)


def _power_of_two(number: int) -> int:
    """The least that is not below ``number``."""
    return 1 << (number - 1).bit_length()


def _num_tiles(tile: ProductTile, num_columns: int, num_rows: int) -> int:
    return -(-num_columns // tile.columns) * -(-num_rows // tile.rows)


def expert_tile(num_rows: int, num_experts: int, packed: bool, hopper: bool) -> ExpertTile:
    """``num_rows``: of all ``num_experts`` together. ``packed``: their weights are in MXFP4."""
    if hopper and packed and 2 * num_rows <= num_experts:
        return ExpertTile(rows=16, columns=32, num_warps=4, num_stages=5)
    if hopper and num_rows <= 16 * num_experts:
        return ExpertTile(rows=16, num_warps=4, num_stages=3)
    if hopper:
        return ExpertTile(rows=128, num_warps=4 if packed else 8)
    return ExpertTile(columns=32, num_warps=4) if packed else ExpertTile()
