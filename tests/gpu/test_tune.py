"""``holdfast tune`` on a GPU: a table of a small model, and the same bits with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu.test_same_bits import CONFIG, SHAPES, WIDE, all_at_once
from tests.parity.checkpoints import make_checkpoint
from tests.workers.engine import Engine
from workers.engine.tuning import engine_shapes
from workers.kernels import tune
from workers.kernels.tile_table import write_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_table_is_measured_and_changes_no_bit(tmp_path: Path) -> None:
    make_checkpoint("qwen3-moe", tmp_path, num_hidden_layers=2, **WIDE, **SHAPES["qwen3-moe"])
    expected = all_at_once(Engine(CONFIG, model=tmp_path))
    shapes, device, kv_dtype = engine_shapes(replace(CONFIG, model=tmp_path), 1)
    found = list(tune.tune(shapes, device, kv_dtype, lambda done, total: None))
    assert {each.shape for each in found} == set(shapes)
    assert all(each.us <= each.rule_us for each in found)
    write_table(tmp_path / "tiles.json", device, tune.table_of(found))
    assert all_at_once(Engine(CONFIG, model=tmp_path, tile_table=tmp_path / "tiles.json")) == expected
