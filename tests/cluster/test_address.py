"""``holdfast serve --address``: a Ray cluster that asks for a token, and one without room."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.ray_head import ray_head
from tests.cluster.served import HOLDFAST, Served
from tests.waiting import until

TOKEN = "0123456789abcdef" * 4
START_S = 60


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    """The address of a Ray cluster that asks for ``TOKEN``."""
    with ray_head(tmp_path, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as ray:
        yield ray.address


async def test_a_token_is_found_and_its_absence_is_explained(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    flags = ("--workers", "1", "--address", head)
    served = Served(tmp_path, *flags)
    try:
        await until(lambda: len(served.workers()) == 1, START_S, "the worker")
        assert served.stop() == 0
    finally:
        served.abandon()
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))  # whose token would be found
    command = [*HOLDFAST, "serve", *flags, "--journal-path", str(tmp_path / "j.db")]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"holdfast: address: the Ray cluster at {head} refuses to connect; "), done.stderr
    assert "set RAY_AUTH_MODE=token" in last


async def test_a_start_without_room_says_what_it_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with ray_head(tmp_path, num_cpus=0) as head:
        flags = ["--address", head.address, "--workers", "1", "--tp", "2", "--start-timeout-s", "5", "--device", "cpu"]
        command = [*HOLDFAST, "serve", *flags, "--journal-path", str(tmp_path / "j.db"), "--port", "0"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=180)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        waits = "worker-0 (waits for Ray to have 1 CPU free for each of 2 ranks)"
        # On a busy machine its router may not serve by then, and is named after it.
        assert last.startswith(f"holdfast: not ready within 5 s: {waits}"), done.stderr
        assert not head.actors(), "nothing waits on behind it"
