"""Tiles of the Triton kernels that suit their interpreter."""

from __future__ import annotations

import pytest

from workers.kernels import attention_launch, experts_launch, products_launch
from workers.kernels.attention_launch import Blocks
from workers.kernels.experts_launch import ExpertBlocks
from workers.kernels.products_launch import ProductBlocks


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits of short contexts, and less to compute."""
    monkeypatch.setattr(attention_launch, "blocks_of", lambda v_dim: Blocks(16, 16, 16))
    monkeypatch.setattr(products_launch, "blocks_of", lambda num_columns: ProductBlocks(256, rows=32, depth=128))
    monkeypatch.setattr(experts_launch, "BLOCKS", ExpertBlocks(rows=16, columns=32, depth=32))
