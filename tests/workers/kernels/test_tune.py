"""Measured tiles: what is measured, which tile is taken, the file, and that it changes no token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from triton.runtime.errors import OutOfResources

from cluster.cli.main import cli
from holdfast.errors import ConfigError
from tests.parity.checkpoints import make_checkpoint
from tests.workers.engine import SMALL, Engine
from workers.engine.tuning import engine_shapes
from workers.kernels import tiles, tune
from workers.kernels.paged_attention import HeadShape
from workers.kernels.tile_table import read_table, write_table
from workers.kernels.tiles import (
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
from workers.kernels.tune import Found, Trial, table_of
from workers.scheduling import SamplingParams

CPU = torch.device("cpu")
RULE, OTHER, THIRD = ProductTile(32), ProductTile(64), ProductTile(128)
PRODUCT = ProductShape(64, 32, torch.bfloat16)
EXPERTS = ExpertShape(8, 64, 32, torch.float16, "mxfp4")
HEADS = AttentionShape(HeadShape(4, 64), 16, 128, torch.bfloat16)
BLOCKS, NARROW = Blocks(64, 64, 512), Blocks(16, 64, 512, 1)
MEASURED: dict[Shape, list[tuple[int, Tile]]] = {
    PRODUCT: [(16, OTHER), (64, RULE)],
    EXPERTS: [(4, ExpertTile())],
    HEADS: [(1, AttentionTiles(NARROW, BLOCKS))],
}


def best(monkeypatch: pytest.MonkeyPatch, us: dict[Tile, float], check: Callable[[Tile], torch.Tensor]) -> Found:
    monkeypatch.setattr(tune, "_microseconds", lambda trial, tile: us[tile])
    trial = Trial(16, RULE, [tile for tile in us if tile != RULE], check, lambda tile: None)
    return tune._best(PRODUCT, trial, trial.candidates)


def test_the_fastest_tile_with_the_same_bits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def alike(tile: Tile) -> torch.Tensor:
        return torch.tensor(1.0)

    def another(tile: Tile) -> torch.Tensor:
        return torch.tensor(1.0 + (2**-23 if tile == OTHER else 0.0))

    def too_large(tile: Tile) -> torch.Tensor:
        if tile == OTHER:
            raise OutOfResources(1, 0, "shared memory")
        return torch.tensor(1.0)

    times: dict[Tile, float] = {RULE: 100.0, OTHER: 50.0, THIRD: 70.0}
    found = best(monkeypatch, times, alike)
    assert (found.tile, found.us, found.rule_us) == (OTHER, 50.0, 100.0)
    assert best(monkeypatch, times, another).tile == THIRD
    assert best(monkeypatch, times, too_large).tile == THIRD
    assert best(monkeypatch, {RULE: 100.0, OTHER: 99.0}, alike).tile == RULE


SHAPES: list[Shape] = [
    ProductShape(40, 32, torch.float16),
    ProductShape(40, 32, torch.float16, packed=True),
    *(ExpertShape(4, 32, 32, torch.float16, form) for form in ("plain", "fp8", "mxfp4")),
    AttentionShape(HeadShape(2, 16), 4, 0, torch.float16),
    AttentionShape(HeadShape(2, 16), 4, 24, torch.float16),
]


def all_end(shapes: list[Shape], device: torch.device, kv_dtype: torch.dtype, _: object) -> set[tuple[Shape, Tile]]:
    """Instead of processes, which would not see what a test has set."""
    of_shapes = ((shape, trial) for shape in shapes for trial in tune.trials(shape, device, kv_dtype))
    return {(shape, tile) for shape, trial in of_shapes for tile in (trial.rule, *trial.candidates)}


def test_every_kind_of_shape_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, whose times mean nothing: what was slow before is fast now, so every other tile is taken."""
    small = {"ROWS": (4, 20), "FEW": 4, "CONTEXT": 48, "BATCH": 2, "CHECKED": 8, "KV_HEADS": 1, "TOP_K": 2}
    for name, value in {**small, "_compile": all_end, "GAIN": 1.0}.items():
        monkeypatch.setattr(tune, name, value)
    blocks, other = Blocks(16, 16, 16), Blocks(32, 16, 16)
    monkeypatch.setattr(tiles, "attention_tiles", lambda *shape: AttentionTiles(blocks, blocks))
    monkeypatch.setattr(tiles, "product_tile", lambda *shape: ProductTile(16, 16, 16))
    monkeypatch.setattr(tiles, "expert_tile", lambda *shape: ExpertTile(16, 16, 32))
    monkeypatch.setattr(tune, "product_tiles", lambda rows: [ProductTile(32, 16, 16)])
    monkeypatch.setattr(tune, "expert_tiles", lambda *shape: [ExpertTile(32, 32, 32)])
    for name in ("decode_blocks", "extend_blocks"):
        monkeypatch.setattr(tune, name, lambda rule: [other])
    times = itertools.count(100, -1)

    def measured(trial: Trial, tile: Tile) -> float:
        trial.run(tile)
        return float(next(times))

    monkeypatch.setattr(tune, "_microseconds", measured)
    table = table_of(tune.tune(SHAPES, CPU, torch.float16, lambda done, total: None))
    assert table == {
        **{shape: [(rows, ProductTile(32, 16, 16)) for rows in (4, 20)] for shape in SHAPES[:2]},
        **{shape: [(rows, ExpertTile(32, 32, 32)) for rows in (2, 8, 40)] for shape in SHAPES[2:5]},
        **{shape: [(48, AttentionTiles(other, other))] for shape in SHAPES[5:]},
    }


def test_a_candidate_that_never_ends_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, other = ProductTile(32, 16, 16), ProductTile(64, 16, 16)
    monkeypatch.setattr(tune, "ROWS", (4,))
    monkeypatch.setattr(tiles, "product_tile", lambda *shape: ProductTile(16, 16, 16))
    monkeypatch.setattr(tune, "product_tiles", lambda rows: [hanging, other])
    monkeypatch.setattr(tune, "_compile", lambda *given: all_end(*given) - {(SHAPES[0], hanging)})
    measured = set[Tile]()

    def note(trial: Trial, tile: Tile) -> float:
        measured.add(tile)
        return 1.0

    monkeypatch.setattr(tune, "_microseconds", note)
    list(tune.tune(SHAPES[:1], CPU, torch.float16, lambda done, total: None))
    assert measured == {ProductTile(16, 16, 16), other}


def test_a_table_has_decodes_and_extends_tiles_together() -> None:
    first = Found(HEADS, 1, AttentionTiles(NARROW, BLOCKS), 1.0, 2.0)
    second = Found(HEADS, 4096, AttentionTiles(BLOCKS, NARROW), 1.0, 2.0)
    products = [Found(PRODUCT, rows, OTHER, 1.0, 2.0) for rows in (16, 64)]
    assert table_of([*products, first, second]) == {
        PRODUCT: [(16, OTHER), (64, OTHER)],
        HEADS: [(4096, AttentionTiles(NARROW, NARROW))],
    }


def test_an_engine_finds_what_was_measured(tmp_path: Path) -> None:
    write_table(tmp_path / "tiles.json", CPU, MEASURED)
    read = read_table(tmp_path / "tiles.json", CPU)
    assert [read.product(PRODUCT, rows, CPU) for rows in (1, 16, 17, 64, 1000)] == [OTHER, OTHER, RULE, RULE, RULE]
    assert read.experts(EXPERTS, 100, CPU) == ExpertTile()
    assert read.attention(HEADS, CPU) == AttentionTiles(NARROW, BLOCKS)
    unknown = ProductShape(64, 33, torch.bfloat16)
    assert read.product(unknown, 5, CPU) == Tiles().product(unknown, 5, CPU)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda table: table.pop(key)


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no version": without("version"),
    "no products": without("products"),
    "no tiles": lambda table: table["products"][0].update(tiles=[]),
    "no rows": lambda table: table["products"][0]["tiles"][0].pop("rows"),
    "a tile of another kind": lambda table: table["experts"][0]["tiles"][0]["tile"].update(split=3),
    "a tile without columns": lambda table: table["products"][0]["tiles"][0]["tile"].pop("columns"),
    "no whole number": lambda table: table["products"][0]["tiles"][0]["tile"].update(columns=3.5),
    "zero": lambda table: table["products"][0]["tiles"][0]["tile"].update(num_warps=0),
    "no dtype": lambda table: table["products"][0]["shape"].update(dtype="nn"),
    "an unknown part of a shape": lambda table: table["attention"][0]["shape"].update(rank=3),
    "a list": lambda table: table["attention"].append([]),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_table_is_refused(tmp_path: Path, how: str) -> None:
    path = tmp_path / "tiles.json"
    write_table(path, CPU, MEASURED)
    table = json.loads(path.read_text())
    BROKEN[how](table)
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="is not a table that holdfast tune wrote"):
        read_table(path, CPU)


def test_files_that_are_no_table_of_this_gpu_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_table(path, CPU)
    for content in ("", "[]", "null", '{"version": 1', "\x00"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="is not a table that holdfast tune wrote"):
            read_table(path, CPU)
    write_table(path, CPU, MEASURED)
    path.write_text(path.read_text().replace('"cpu"', '"NVIDIA X"'))
    with pytest.raises(ConfigError, match="was measured on 'NVIDIA X', and this is 'cpu'; run holdfast tune here"):
        read_table(path, CPU)
    path.write_text('{"version": 2}')
    with pytest.raises(ConfigError, match="has version 2, and this release reads 1"):
        read_table(path, CPU)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write_table(tmp_path / "none" / "tiles.json", CPU, {})


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_shapes_are_those_of_a_rank_s_share(tmp_path: Path, num_ranks: int) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_checkpoint("mixtral", tmp_path, num_hidden_layers=1, **sizes)
    shapes, device, _ = engine_shapes(replace(SMALL, model=tmp_path), num_ranks)
    assert device == CPU
    experts = [shape for shape in shapes if isinstance(shape, ExpertShape)]
    assert [shape.size for shape in experts] == [48 // num_ranks]
    (attention,) = (shape for shape in shapes if isinstance(shape, AttentionShape))
    assert attention.page_size == SMALL.page_size
    products = {(shape.columns, shape.depth) for shape in shapes if isinstance(shape, ProductShape)}
    q = 4 * attention.heads.v_dim
    assert (2 * q // num_ranks, 64) in products  # query, key and value
    assert (64, q // num_ranks) in products  # attention's output


def test_a_table_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    config: dict[str, Any] = {"model": tmp_path, "attention_backend": "triton", "page_size": 4}
    prompt, params = list(range(3, 30)), SamplingParams(max_tokens=3, ignore_eos=True)
    expected = Engine(SMALL, **config).generate("s", prompt, params)
    shapes, _, _ = engine_shapes(replace(SMALL, **config), 1)
    small = AttentionTiles(Blocks(16, 32, 512), Blocks(16, 32, 512))
    measured: dict[Shape, list[tuple[int, Tile]]] = {
        shape: [(8, small if isinstance(shape, AttentionShape) else ProductTile(64, 16, 64))] for shape in shapes
    }
    write_table(tmp_path / "tiles.json", CPU, measured)
    found: set[Tile | None] = set()
    real = Tiles.find

    def find(self: Tiles, shape: Shape, num_rows: int) -> Tile | None:
        found.add(tile := real(self, shape, num_rows))
        return tile

    monkeypatch.setattr(Tiles, "find", find)
    assert Engine(SMALL, **config, tile_table=tmp_path / "tiles.json").generate("s", prompt, params) == expected
    assert found == {small, ProductTile(64, 16, 64)}


def test_tuning_needs_a_gpu() -> None:
    result = CliRunner().invoke(cli, ["tune", "--device", "cpu"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception.message) == "device: tiles are measured on a GPU, and this is cpu"
