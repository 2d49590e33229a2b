"""Shared by the benchmarks: a cluster to measure, and the files of results."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from cluster.config import Config
from cluster.ray_backend.cluster import Cluster
from cluster.ray_backend.connect import connect
from workers.config import BUNDLED_MODEL

RESULTS = Path(__file__).parent / "results"


def save(name: str, figures: dict[str, Any]) -> None:
    """Print and store the figures, with the machine that they were measured on."""
    machine = {"cores": os.cpu_count(), "cpu": platform.machine(), "torch": torch.__version__}
    text = json.dumps({"machine": machine} | figures, indent=2)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)


@contextmanager
def long_context_model(context_len: int) -> Iterator[Path]:
    """The bundled model with a longer context: only its speed matters here."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        model = Path(folder) / "holdfast-tiny"
        shutil.copytree(BUNDLED_MODEL, model)
        config = json.loads((model / "config.json").read_text())
        config["max_position_embeddings"] = context_len
        (model / "config.json").write_text(json.dumps(config))
        yield model


@contextmanager
def wide_model(intermediate_size: int) -> Iterator[Path]:
    """The bundled model with neurons that add nothing: it says the same, and reads as many bytes as a larger one."""
    with long_context_model(4096) as model:
        path = model / "model.safetensors"
        weights = load_file(path)
        for name, weight in weights.items():
            if ".mlp." in name:
                is_down = "down_proj" in name
                added = intermediate_size - weight.shape[1 if is_down else 0]
                weights[name] = pad(weight, (0, added) if is_down else (0, 0, 0, added))
        save_file(weights, path, metadata={"format": "pt"})
        config = json.loads((model / "config.json").read_text())
        config["intermediate_size"] = intermediate_size
        (model / "config.json").write_text(json.dumps(config))
        yield model


@asynccontextmanager
async def serving(folder: Path | None = None, **settings: Any) -> AsyncIterator[Cluster]:
    """A cluster on this machine, on free ports, with a new journal, or the one in ``folder``."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as own:
        journal = (folder or Path(own)) / "journal.db"
        config = Config(port=0, grpc_port=0, device="cpu", journal_path=journal, **settings)
        connect(config)
        cluster = Cluster(config)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.stop()
            ray.shutdown()
