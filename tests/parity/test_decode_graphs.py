"""Decodes as graphs, through the kernels of a GPU: the same bits as step by step, for every family and batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.errors import ConfigError
from tests.parity.checkpoints import make_checkpoint
from tests.parity.op_graph import OpGraphs, kernels_in
from tests.parity.small_tiles import use_small_tiles
from tests.workers.engine import SMALL, Engine
from workers.engine import decode_graphs
from workers.engine import rank as rank_module
from workers.engine.decode_graphs import sizes_up_to
from workers.progress import Progress, progress_told_to
from workers.scheduling import SamplingParams

FAMILIES = {"llama": 16, "gemma2": 4, "gpt-oss": 4, "deepseek-v3": 4, "qwen3-moe": 16, "mistral-window": 1}
"""With the page size of each."""
IN_LONG_RUNS = {"llama", "qwen3-moe", "gemma2", "mistral-window"}
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def small_tiles_and_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch)
    monkeypatch.setattr(decode_graphs, "SHORT_CONTEXT", 24)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> OpGraphs:
    """What captures, of the engines that ``with_graphs`` makes."""
    captured = OpGraphs()
    kernels_in(captured, monkeypatch)
    return captured


def with_graphs(graphs: OpGraphs, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    with monkeypatch.context() as patch:
        patch.setattr(rank_module, "capture_of", lambda device: graphs)
        return Engine(SMALL, **settings)


class LogitsOf:
    """Notes the logits of each step that an engine computes."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[torch.Tensor] = []
        model = engine.leader.rank._model
        forward = model.forward

        def noted(batch: Any, states: Any = None) -> Any:
            logits = forward(batch, states)
            if logits is not None:
                self.steps.append(logits.clone())
            return logits

        model.forward = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_gives_the_bits_of_its_launches(
    family: str, tmp_path: Path, graphs: OpGraphs, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    if family in IN_LONG_RUNS and not long:
        pytest.skip("make test-long")
    shape = {} if family in IN_LONG_RUNS else {"num_hidden_layers": 2}
    make_checkpoint(family, tmp_path, **shape)
    settings: dict[str, Any] = {
        "model": tmp_path,
        "attention_backend": "triton",
        "page_size": FAMILIES[family],
        "chunked_prefill_size": 40,
        "context_length": 48,
    }
    engines = [Engine(SMALL, **settings), with_graphs(graphs, monkeypatch, **settings, cuda_graph_max_bs=2)]
    assert graphs.num_graphs == 2 * 2 and graphs.num_replays == 0
    noted = [LogitsOf(engine) for engine in engines]
    for engine in engines:
        # Batches of two and one; contexts on both sides of the short graphs' end, and of a window.
        prompts = [[3 + (7 * p + 31 * i) % 190 for p in range(length)] for i, length in enumerate((22, 3))]
        for i, prompt in enumerate(prompts):
            engine.submit(f"t{i}", f"s{i}", prompt, replace(GREEDY, max_tokens=5 - 2 * i))
        engine.run()
        engine.submit("on", "s1", [*prompts[1], *engine.output("t1"), 9], GREEDY)
        engine.run()
    assert graphs.num_replays == 6
    assert engines[0].output("on") == engines[1].output("on")
    assert len(noted[0].steps) == len(noted[1].steps)
    for alone, replayed in zip(noted[0].steps, noted[1].steps, strict=True):
        assert torch.equal(alone, replayed)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_no_graph_computes_is_launched(
    overlap: bool, tmp_path: Path, graphs: OpGraphs, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    """A larger batch, and a decode beside a prefill. A step's tokens are those that the one before chose, which with
    overlap the host has not seen.
    """
    if not (overlap or long):
        pytest.skip("make test-long")
    make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    settings = {
        "model": tmp_path,
        "attention_backend": "triton",
        "context_length": 24,
        "chunked_prefill_size": 8,
        "overlap_schedule": overlap,
    }
    engines = [Engine(SMALL, **settings), with_graphs(graphs, monkeypatch, **settings, cuda_graph_max_bs=1)]
    assert graphs.num_graphs == 1
    for engine in engines:
        engine.submit("a", "a", [5, 6, 7], replace(GREEDY, max_tokens=8, temperature=0.8, seed=1))
        engine.leader.step()
        engine.submit("b", "b", list(range(3, 13)), GREEDY)
        engine.run()
    assert [engines[0].output(turn) for turn in "ab"] == [engines[1].output(turn) for turn in "ab"]
    assert 2 <= graphs.num_replays < 7


def test_graphs_are_captured_where_they_are_wanted(
    tmp_path: Path, graphs: OpGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama", tmp_path, num_hidden_layers=1)
    for settings in (
        {"attention_backend": "triton", "disable_cuda_graph": True},
        {"attention_backend": "torch_native"},
    ):
        engine = with_graphs(graphs, monkeypatch, model=tmp_path, context_length=64, **settings)
        assert engine.leader.rank._model._graphs is None
    assert graphs.num_graphs == 0
    told = list[Progress]()
    with progress_told_to(told.append):
        with_graphs(graphs, monkeypatch, model=tmp_path, attention_backend="triton", max_running_requests=3)
    assert told == [Progress("loads layers", 1, 1), *(Progress("captures graphs", done, 3) for done in (1, 2, 3))]
    assert sizes_up_to(1) == [1] and sizes_up_to(32) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert sizes_up_to(100) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]


def test_a_device_without_memory_for_a_graph(tmp_path: Path, graphs: OpGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint("llama", tmp_path)

    def full(self: Any, run: Any) -> Any:
        raise torch.OutOfMemoryError("1 MB is free")

    monkeypatch.setattr(OpGraphs, "__call__", full)
    with pytest.raises(ConfigError, match="cuda_graph_max_bs: no memory for the graph of 4 sequences"):
        with_graphs(graphs, monkeypatch, model=tmp_path, attention_backend="triton", max_running_requests=4)


def test_a_replay_reads_memory_and_nothing_else() -> None:
    """Or else the tests above could not fail."""
    graphs, x, step = OpGraphs(), torch.zeros(2), 1

    def run() -> torch.Tensor:
        return (x + step).sum().view(1) * 2

    result, replay = graphs(run)
    x.fill_(3.0)
    step = 5
    replay()
    assert result.item() == 16.0, "with the step of its capture"
    with pytest.raises(AssertionError, match="cannot wait"):
        graphs(lambda: x.sum().item())
