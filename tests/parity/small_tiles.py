"""Tiles of the Triton kernels that suit their interpreter."""

from __future__ import annotations

import pytest

from workers.kernels import tiles
from workers.kernels.tiles import AttentionTiles, Blocks, ExpertTile, ProductTile

SMALL = Blocks(16, 16, 16)


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits of short contexts, and less to compute."""
    monkeypatch.setattr(tiles, "attention_tiles", lambda v_dim, hopper: AttentionTiles(SMALL, SMALL))
    monkeypatch.setattr(tiles, "product_tile", lambda *shape: ProductTile(256, rows=32, depth=128))
    monkeypatch.setattr(tiles, "expert_tile", lambda *shape: ExpertTile(rows=16, columns=32, depth=32))
