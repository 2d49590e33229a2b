"""``holdfast serve`` under signals to its whole process group: it ends in time, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from openai import APIError, AsyncOpenAI

from tests.cluster.served import Served, shared_memory, stream

DRAIN_S = 2.0
BOUND_S = 5.0
"""How much longer than ``drain_timeout_s`` the whole stop takes at most."""
SLACK_S = 10.0
"""For a busy machine. Without a bound, Ray's client waits for a minute."""
NUM_TOKENS = 4000
"""More than are generated before the drain ends."""


async def stream_until_cut(client: AsyncOpenAI, session: str, started: asyncio.Event) -> None:
    with contextlib.suppress(APIError, httpx.HTTPError):
        await stream(client, session, 5, started.set, num_tokens=NUM_TOKENS)
        raise AssertionError("the turn was over before the signal")


def signal_group(served: Served, number: signal.Signals) -> None:
    os.killpg(served.process.pid, number)


def signal_every_process(served: Served, number: signal.Signals) -> None:
    """As systemd does with its default, ``KillMode=control-group``."""
    for process in [psutil.Process(served.process.pid), *psutil.Process(served.process.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def signal_group_and_lose_the_raylet(served: Served, number: signal.Signals) -> None:
    """A raylet that is signalled too may be gone before the cluster has stopped."""
    (raylet,) = (p for p in psutil.Process(served.process.pid).children(recursive=True) if p.name() == "raylet")
    signal_group(served, number)
    raylet.kill()


@pytest.mark.parametrize(
    ("send", "number"),
    [
        (signal_group, signal.SIGTERM),
        (signal_group, signal.SIGINT),
        (signal_every_process, signal.SIGTERM),
        (signal_group_and_lose_the_raylet, signal.SIGTERM),
    ],
)
async def test_a_signal_with_live_turns_ends_everything_in_time(
    tmp_path: Path, send: object, number: signal.Signals, long: bool
) -> None:
    if number == signal.SIGINT and not long:
        pytest.skip("make test-long; test_guard.py has both signals")
    before = shared_memory()
    served = Served(tmp_path, "--workers", "1", "--drain-timeout-s", str(DRAIN_S))
    try:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            started = [asyncio.Event() for _ in range(3)]
            turns = [asyncio.create_task(stream_until_cut(client, f"s{i}", e)) for i, e in enumerate(started)]
            await asyncio.gather(*(event.wait() for event in started))
            served.family += psutil.Process(served.process.pid).children(recursive=True)
            sent_at = time.monotonic()
            send(served, number)  # type: ignore[operator]
            code = await asyncio.to_thread(served.process.wait, 60)
            took_s = time.monotonic() - sent_at
            await asyncio.gather(*turns)
        assert code == 0
        assert not served.left(), "no process is left"
        assert shared_memory() <= before, "no shared memory is left"
        assert took_s < DRAIN_S + BOUND_S + SLACK_S, served.log_tail()
        assert "fatal" not in served.log_tail().lower()
    finally:
        served.abandon()
