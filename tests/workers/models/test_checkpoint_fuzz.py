"""Checkpoints with damaged headers and configs: each is loaded, or refused by name; nothing else is raised."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from holdfast.errors import HoldfastError
from tests.parity.checkpoints import make_checkpoint
from workers.models import load_decoder, read_config

FEW, MANY = 300, 10_000
FAMILIES = ("llama", "gemma3", "gpt-oss", "qwen2-moe", "deepseek-v3", "phi3")
NUMBERS = (-1, 0, 1, 3, 7, 2**31, 2**70, 0.5, -2.5, 1e300)
VALUES: tuple[Any, ...] = (None, True, *NUMBERS, "", "x", "F32", [], [0, 3], {}, {"a": 1})
Damage: TypeAlias = Callable[[random.Random, bytes], bytes]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(request.param, folder)
    return folder


def load(folder: Path) -> None:
    load_decoder(folder, read_config(folder), device=torch.device("cpu"), dtype=torch.float32, context_len=64)


def play(checkpoint: Path, folder: Path, name: str, damage: Damage, count: int) -> None:
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    whole, refused = (checkpoint / name).read_bytes(), 0
    for seed in range(count):
        damaged = damage(random.Random(seed), whole)
        (folder / name).write_bytes(damaged)
        try:
            load(folder)
        except HoldfastError as error:
            assert str(error), seed
            refused += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r} for {damaged[:600]!r}") from error
    assert refused > count // 4


def damaged_header(rng: random.Random, whole: bytes) -> bytes:
    """The length in front, the JSON behind it, or the file's end."""
    size = int.from_bytes(whole[:8], "little")
    header = bytearray(whole[8 : 8 + size])
    match rng.randrange(5):
        case 0:
            size = rng.choice((0, 1, size - 1, size + 1, len(whole), 2**31, 2**63, rng.randrange(2**64)))
        case 1:
            for _ in range(rng.randrange(1, 4)):
                header[rng.randrange(len(header))] = rng.randrange(256)
        case 2:
            tensors = json.loads(header)
            entry = tensors[rng.choice([name for name in tensors if name != "__metadata__"])]
            entry[rng.choice(("dtype", "shape", "data_offsets"))] = rng.choice(VALUES)
            header = bytearray(json.dumps(tensors).encode())
            size = len(header)
        case 3:
            tensors = json.loads(header)
            old, new = rng.sample([name for name in tensors if name != "__metadata__"], 2)
            tensors[old], tensors[new] = tensors[new], tensors[old]
            header = bytearray(json.dumps(tensors).encode())
            size = len(header)
        case _:
            return whole[: rng.randrange(len(whole))]
    return size.to_bytes(8, "little") + bytes(header) + whole[8 + int.from_bytes(whole[:8], "little") :]


def damaged_config(rng: random.Random, whole: bytes) -> bytes:
    config = json.loads(whole)
    for _ in range(rng.randrange(1, 3)):
        key = rng.choice(sorted(config))
        if rng.random() < 0.2:
            del config[key]
        else:
            config[key] = rng.choice(VALUES)
    return json.dumps(config).encode()


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_damaged_header_is_loaded_or_refused(checkpoint: Path, tmp_path: Path, long: bool) -> None:
    play(checkpoint, tmp_path / "damaged", "model.safetensors", damaged_header, MANY if long else FEW)


@pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True)
def test_a_damaged_config_is_loaded_or_refused(checkpoint: Path, tmp_path: Path, long: bool) -> None:
    play(checkpoint, tmp_path / "damaged", "config.json", damaged_config, MANY if long else FEW // len(FAMILIES))
