"""Whole engines whose attention runs in Triton's interpreter: the same greedy tokens as on torch, for every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from tests.parity.checkpoints import make_checkpoint
from tests.workers.engine import SMALL, Engine
from workers.config import BUNDLED_MODEL
from workers.engine.rank import pick_device
from workers.kernels import attention, attention_launch
from workers.kernels.attention_launch import Blocks
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
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several splits of short contexts, and less to compute in the interpreter."""
    monkeypatch.setattr(attention_launch, "blocks_of", lambda v_dim: Blocks(16, 16, 32))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_torch(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    said = []
    for backend in ("torch_native", "triton"):
        engine = Engine(
            SMALL, model=tmp_path, attention_backend=backend, page_size=FAMILIES[family], chunked_prefill_size=24
        )
        prompt = [3 + 7 * i % 190 for i in range(45)]
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
        attention.attention_planner("triton", device)
    with pytest.raises(ConfigError, match="'x' is not one of auto, torch_native, triton"):
        attention.attention_planner("x", device)
    assert attention.attention_planner("auto", device) is attention.plan_attention


def test_the_bundled_model_retracts_and_replays_to_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law L14 through the kernels: what was decoded is computed again in chunks."""
    tight = {"max_total_tokens": 100, "chunked_prefill_size": 16, "page_size": 4, "context_length": 90}
    config = {"model": BUNDLED_MODEL, "attention_backend": "triton"}
    free, full = Engine(SMALL, **config), Engine(SMALL, **config, **tight)
    sampled = SamplingParams(max_tokens=20, temperature=1.0, seed=3, ignore_eos=True)
    for i in range(3):
        prompt = [5 + (i * 131 + j * 17) % 2000 for j in range(20)]
        for engine in (free, full):
            engine.submit(f"t{i}", f"s{i}", prompt, sampled)
    free.run()
    full.run()
    assert full.scheduler.num_retracted > 0 and free.scheduler.num_retracted == 0
    assert [free.output(f"t{i}") for i in range(3)] == [full.output(f"t{i}") for i in range(3)]
