"""The file of measured tiles: what ``holdfast tune`` writes, and an engine reads.

A table belongs to one kind of GPU. It changes how fast a step is, never a token: each of its tiles gave the bits of the
tile that it replaces when it was measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from holdfast.errors import ConfigError
from workers.kernels.paged_attention import HeadShape
from workers.kernels.tiles import (
    AttentionShape,
    AttentionTiles,
    Blocks,
    ExpertShape,
    ExpertTile,
    Measured,
    ProductShape,
    ProductTile,
    Shape,
    Tile,
    Tiles,
)

VERSION = 1
KINDS: dict[str, tuple[type[Shape], type[Tile]]] = {
    "products": (ProductShape, ProductTile),
    "experts": (ExpertShape, ExpertTile),
    "attention": (AttentionShape, AttentionTiles),
}
Made = TypeVar("Made")


def write_table(path: Path, device: torch.device, measured: Measured) -> None:
    """Write a table of the tiles that were measured on ``device``. Raises ConfigError."""
    table: dict[str, Any] = {"version": VERSION, "device": _name(device)}
    for kind, (shape_type, _) in KINDS.items():
        table[kind] = [
            {"shape": _plain(shape), "tiles": [{"rows": rows, "tile": asdict(tile)} for rows, tile in tiles]}
            for shape, tiles in measured.items()
            if isinstance(shape, shape_type)
        ]
    try:
        path.write_text(json.dumps(table, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"tile_table: {path} cannot be written: {error.strerror}") from error


def read_table(path: Path, device: torch.device) -> Tiles:
    """The tiles of a table for ``device``.

    Raises ConfigError if it cannot be read, is no table, or was measured on another GPU.
    """
    try:
        table = json.loads(path.read_text())
        if table["version"] != VERSION:
            raise ConfigError(f"tile_table: {path} has version {table['version']!r}, and this release reads {VERSION}")
        if table["device"] != _name(device):
            raise ConfigError(
                f"tile_table: {path} was measured on {table['device']!r}, and this is {_name(device)!r}; "
                "run holdfast tune here"
            )
        return Tiles(dict(_entry(kind, entry) for kind in KINDS for entry in table[kind]))
    except OSError as error:
        raise ConfigError(f"tile_table: {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"tile_table: {path} is not a table that holdfast tune wrote: {error!r}") from error


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _entry(kind: str, entry: dict[str, Any]) -> tuple[Shape, Sequence[tuple[int, Tile]]]:
    shape_type, tile_type = KINDS[kind]
    given = dict(entry["shape"])
    dtype = getattr(torch, given.pop("dtype"))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['shape']['dtype']} is no dtype")
    if "heads" in given:
        given["heads"] = _made(HeadShape, given["heads"])
    shape = shape_type(**given, dtype=dtype)
    tiles = [(_whole(each["rows"]), _tile(tile_type, each["tile"])) for each in entry["tiles"]]
    if not tiles:
        raise ValueError(f"{shape} has no tiles")
    return shape, sorted(tiles, key=lambda pair: pair[0])


def _tile(kind: type[Tile], given: dict[str, Any]) -> Tile:
    if kind is AttentionTiles:
        return AttentionTiles(**{name: _made(Blocks, value) for name, value in given.items()})
    return _made(kind, given)


def _made(kind: type[Made], given: dict[str, Any]) -> Made:
    """A dataclass of whole numbers."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # only dataclasses are passed
    if set(given) != names:
        raise ValueError(f"{sorted(names ^ set(given))} are missing, or unknown")
    return kind(**{name: _whole(value) for name, value in given.items()})


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a positive number")
    return value


def _plain(shape: Shape) -> dict[str, Any]:
    return {**asdict(shape), "dtype": str(shape.dtype).removeprefix("torch.")}
