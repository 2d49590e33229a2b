"""NCCL's operations in a rank's graphs, as far as one GPU shows them: of a group that has one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.checkpoints import make_checkpoint
from tests.workers import engine
from tests.workers.engine import Engine
from workers.config import EngineConfig
from workers.engine.collectives import Collectives
from workers.engine.leader import Leader
from workers.models.parallel import Shard
from workers.scheduling import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda")


class OfOneRank(Engine):
    """The leader of a group without followers."""

    def __init__(self, config: EngineConfig, **changes: Any) -> None:
        self.updates = {}
        group = Collectives(dist.HashStore(), Shard(), CUDA, "127.0.0.1", 10.0)
        self.leader = Leader(replace(config, **changes), self._take, self._crash, group=group, send=lambda entry: None)
        self.cache, self.scheduler = self.leader.cache, self.leader.scheduler


def test_graphs_with_all_reduces_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path)
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=i, ignore_eos=True) for i in range(5)]
    reduced: list[bool] = []
    real = Collectives.all_reduce

    def all_reduce(self: Collectives, x: torch.Tensor) -> torch.Tensor:
        reduced.append(torch.cuda.is_current_stream_capturing())
        return real(self, x)

    monkeypatch.setattr(Collectives, "all_reduce", all_reduce)
    said = []
    for kind in (Engine, OfOneRank):
        turns = kind(engine.SMALL, model=tmp_path)
        for i, each in enumerate(params):
            turns.submit(f"t{i}", f"s{i}", list(range(3 + i, 30 + 9 * i)), each)
        captured = len(reduced)
        turns.run()
        said.append([turns.output(f"t{i}") for i in range(len(params))])
        launched = len(reduced) - captured
    assert said[0] == said[1]
    assert any(reduced), "an operation was captured"
    assert 0 < launched < 20, "prefills launch them, and decodes replay"
