"""``holdfast bench`` against a router: its figures add up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cluster.bench.load import TurnResult
from cluster.bench.report import percentile, report
from cluster.cli.main import cli
from tests.harness import Harness

SMALL = ("--sessions", "3", "--turns", "3", "--output-tokens", "6", "--input-words", "10")


async def bench(cluster: Harness, *options: str, exit_code: int = 0) -> Any:
    asked = ["bench", "--url", cluster.url, *options]
    result = await asyncio.to_thread(CliRunner().invoke, cli, asked)
    assert result.exit_code == exit_code, result.output
    return result


@pytest.mark.parametrize("loop", [("--concurrency", "2"), ("--rate", "50")], ids=["closed", "open"])
async def test_figures(cluster: Harness, tmp_path: Path, loop: tuple[str, ...]) -> None:
    out, drawn = tmp_path / "out.json", tmp_path / "plot.svg"
    said = (await bench(cluster, *SMALL, *loop, "--out", str(out), "--plot", str(drawn))).output
    figures = json.loads(out.read_text())
    assert figures["turns"] == 9 and figures["failed turns"] == 0
    assert [figures["by turn"][turn]["turns"] for turn in "123"] == [3, 3, 3]
    first, third = (figures["by turn"][turn] for turn in "13")
    assert third["input tokens"] > first["input tokens"]
    assert third["cached share"] > 0.5, "a turn costs its new tokens"
    for known in figures["by turn"].values():
        assert 0 < known["first token ms"]["p50"] <= known["latency ms"]["p50"] <= known["latency ms"]["p99"]
    assert "turns/s" in said and drawn.read_text().startswith("<svg")
    assert await cluster.router.core.journal.list_sessions("") == [], "its sessions are released"


async def test_failures_are_said(cluster: Harness) -> None:
    result = await bench(cluster, *SMALL, "--input-words", "9000", exit_code=1)
    assert "is longer than the model's context length" in result.output
    assert "no router answers" in str(
        (await asyncio.to_thread(CliRunner().invoke, cli, ["bench", "--url", "http://127.0.0.1:9"])).exception
    )


def test_percentiles() -> None:
    values = list(range(1, 101))
    assert [percentile(values, p) for p in (50, 95, 99)] == [51, 96, 100] and percentile([], 50) == 0
    turn = TurnResult(1, 0.2, 0.1, [0.05, 0.05], 10, 5, 3)
    figures = report([turn, TurnResult(2, error="x")], 2.0)
    assert figures["errors"] == ["x"] and figures["output tokens a second"] == 1.5
    assert figures["all turns"]["between tokens ms"]["p50"] == 50 and figures["all turns"]["cached share"] == 0.5
