"""Benchmarks run: what they measure by name still exists. Their figures are not asserted."""

from __future__ import annotations

import pytest

from benchmarks import kv_core, ranks


async def test_the_parts_of_a_step_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STEPS", 30)
    figures = await ranks.measure_steps(1, 1)
    assert set(figures["us of a step, p50"]) >= {"plan", "log", "apply", "collect", "step"}


def test_a_turn_of_the_kv_core_is_timed() -> None:
    assert kv_core.turn_us(1024, 16) > 0
