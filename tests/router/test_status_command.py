"""``holdfast status`` of a cluster with KV stores, after a failover."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from cluster.cli.main import cli
from tests.harness import running
from tests.parity.matrix import CONFIG
from tests.store.nodes import Stub, copied, node, turn, words


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


async def test_status_shows_what_was_loaded_and_what_was_computed_again(tmp_path: Path) -> None:
    engine = replace(CONFIG, kv_store=tmp_path / "store")
    async with (
        node(tmp_path / "store"),
        running(tmp_path / "c", num_workers=2, engine=engine) as cluster,
        cluster.channel() as channel,
    ):
        stub = Stub(channel)
        await turn(stub, "s", words(1, 300))
        lost = cluster.pinned_to("s")
        await copied(cluster, lost)
        await cluster.lose_worker(lost)
        _, cached = await turn(stub, "s", [1, 2, 3])
        assert cached >= 300 + 12 - 8
        await asyncio.sleep(0.5)  # a beat
        shown = await asyncio.to_thread(CliRunner().invoke, cli, ["status", "--url", cluster.url])
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    (loaded,) = [cells(lines[i + 2]) for i, line in enumerate(lines) if "KV tokens loaded" in line]
    assert loaded[1] == str(cached) and int(loaded[2]) > 0 and loaded[3:] == ["0", "0", "0"]
    (again,) = [cells(lines[i + 2]) for i, line in enumerate(lines) if "tokens computed again" in line]
    assert again == ["0", str(300 + 12 - 1 - cached), "0", "0"]
