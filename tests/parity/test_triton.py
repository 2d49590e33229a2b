"""Whole engines whose attention runs in Triton's interpreter: the same greedy tokens as on torch, for every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError
from tests.parity.checkpoints import make_checkpoint
from tests.parity.small_tiles import use_small_tiles
from tests.workers.engine import SMALL, Engine
from tests.workers.test_draft_heads import Watched, make, prompt
from workers.engine.rank import pick_device
from workers.kernels import backend
from workers.scheduling import SamplingParams

FAMILIES = {
    "llama": 16,
    "mistral-window": 4,
    "mixtral-window": 1,
    "qwen2-window": 4,
    "qwen3": 16,
    "qwen3-moe": 64,
    "gemma2": 4,
    "gemma3": 16,
    "gpt-oss": 4,
    "deepseek-v2": 16,
    "deepseek-v3": 4,
    "phi3": 1,
    "olmo2": 4,
}
"""With the page size of each."""
IN_LONG_RUNS = {"mixtral-window", "qwen2-window", "qwen3-moe", "gemma3", "deepseek-v2", "phi3", "llama"}
"""Those whose kernels another one runs too: the interpreter takes its time."""
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_tiles(monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_torch(family: str, tmp_path: Path, long: bool) -> None:
    if family in IN_LONG_RUNS and not long:
        pytest.skip("make test-long")
    make_checkpoint(family, tmp_path)
    said = []
    for name in ("torch_native", "triton"):
        engine = Engine(
            SMALL, model=tmp_path, attention_backend=name, page_size=FAMILIES[family], chunked_prefill_size=20
        )
        prompt = [3 + 7 * i % 190 for i in range(30)]
        outputs = [engine.generate("s", prompt, GREEDY)]
        # A second turn beside another session's first: decodes of unlike length among chunks of a prefill.
        engine.submit("on", "s", prompt + outputs[0] + [9, 8, 7], GREEDY)
        engine.submit("new", "other", prompt[20:], GREEDY)
        engine.run()
        said.append([*outputs, engine.output("on"), engine.output("new")])
    assert said[0] == said[1]


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pick_device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="triton needs a GPU"):
        backend.load_backend("triton", device)
    with pytest.raises(ConfigError, match="'x' is not one of auto, torch_native, triton"):
        backend.load_backend("x", device)
    assert backend.load_backend("auto", device).plan_attention is backend.plan_attention


def test_a_retracted_turn_replays_to_the_same_tokens(tmp_path: Path) -> None:
    """Law L14 through the kernels: what was decoded is computed again in chunks."""
    tight = {"max_total_tokens": 44, "chunked_prefill_size": 8, "page_size": 4, "context_length": 40}
    make_checkpoint("gemma2", tmp_path, vocab_size=2048)
    config = {"model": tmp_path, "attention_backend": "triton"}
    free, full = Engine(SMALL, **config), Engine(SMALL, **config, **tight)
    sampled = SamplingParams(max_tokens=10, temperature=1.0, seed=3, ignore_eos=True)
    for i in range(3):
        prompt = [5 + (i * 131 + j * 17) % 2000 for j in range(8)]
        for engine in (free, full):
            engine.submit(f"t{i}", f"s{i}", prompt, sampled)
    free.run()
    full.run()
    assert full.scheduler.num_retracted > 0 and free.scheduler.num_retracted == 0
    assert [free.output(f"t{i}") for i in range(3)] == [full.output(f"t{i}") for i in range(3)]


@pytest.mark.parametrize("kind", ["MTP", "EAGLE3"])
def test_a_head_drafts_the_same_by_the_kernels_of_a_gpu(kind: str, tmp_path: Path) -> None:
    head, config = make(kind, tmp_path)
    short = replace(GREEDY, max_tokens=5)
    output = Engine(SMALL, model=config["model"]).generate("t", prompt(1, 12), short)
    changes: dict[str, Any] = {
        "attention_backend": "triton",
        "chunked_prefill_size": 8,
        "speculative_num_draft_tokens": 2,
    }
    engine = Engine(SMALL, **config, **changes)
    watched = Watched(engine, head, {"t": output})
    engine.submit("t", "t", prompt(1, 12), short)
    engine.run()
    assert engine.output("t") == output and watched.num_drafts > 1
