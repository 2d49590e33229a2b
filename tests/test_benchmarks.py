"""Benchmarks run: what they measure by name still exists. Their figures are not asserted."""

from __future__ import annotations

import pytest

from benchmarks import grammars, kv_core, kv_memory, predict, ranks, router, step
from benchmarks.common import serving
from workers.config import BUNDLED_MODEL
from workers.kv import full_group, window_group


async def test_the_parts_of_a_step_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STEPS", 30)
    figures = await ranks.measure_steps(1, 1)
    assert set(figures["us of a step, p50"]) >= {"plan", "log", "compute", "collect", "step"}


async def test_a_router_is_compared_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in ("ROUNDS", 2), ("WARM_UP", 1), ("STREAM_TOKENS", 4):
        monkeypatch.setattr(router, name, few)
    async with serving(workers=1, **router.SETTINGS) as cluster:
        figures = await router.measure_latency(cluster)
    assert {"gRPC, no session", "HTTP, no session"} <= set(figures["added by the router"])


def test_a_device_takes_its_time_beside_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "STEPS", 10)
    monkeypatch.setattr(step, "WARM_UP", 2)
    monkeypatch.setattr(step, "replaced", monkeypatch.setattr)
    spent = step.run(BUNDLED_MODEL, 3, 40, step_s=0.02)
    assert {"plan", "log", "launch", "collect", "commit", "choose", "step"} <= set(spent)
    assert spent["between steps"] >= 19_000, "no step is shorter than the device's"


def test_the_document_has_what_is_predicted() -> None:
    assert predict.BEGIN + predict.tables() + predict.END in predict.DOCUMENT.read_text()
    sizes = [model.stored_bytes / 1e9 for model in predict.MODELS]
    assert sizes == pytest.approx([16.06, 13.76], rel=0.01), "the checkpoints' sizes, in GB"


def test_a_turn_of_the_kv_core_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_core, "REPEATS", 3)
    times = kv_core.turn_us(1024, 16)
    assert set(times) == set(kv_core.NUM_GROUPS) and min(times.values()) > 0


def test_an_idle_session_holds_windows_for_its_end_and_its_last_turn() -> None:
    held = kv_memory.pages_held([full_group(2056), window_group(2056, 128)], 32_768)
    assert held["full"] == 2048 and held["window 128"] <= 2 * (128 // 16 + 1)


def test_a_step_with_constrained_rows_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "STEPS", 3)
    assert grammars.step_ms(1) > 0
