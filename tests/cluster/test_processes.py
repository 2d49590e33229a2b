"""Leases: which silence means that a process is lost. Where a process starts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from ray.exceptions import RayError

from cluster.ray_backend import processes
from cluster.ray_backend.processes import on_node, unanswered_for

LEASE_S = 0.5


async def is_silent(probe: Callable[[], Awaitable[object]], within_s: float) -> bool:
    """Whether it is considered silent within some time."""
    waiting = asyncio.wait_for(unanswered_for(LEASE_S, probe), within_s)
    return (await asyncio.gather(waiting, return_exceptions=True))[0] is None


async def never() -> None:
    await asyncio.Event().wait()


async def refused() -> None:
    raise RayError("the actor is unavailable")


@pytest.mark.parametrize("probe", [never, refused])
async def test_a_process_that_never_answers_is_silent(probe: Callable[[], Awaitable[object]]) -> None:
    assert await is_silent(probe, 10 * LEASE_S)


async def test_a_process_that_answers_late_or_rarely_is_not_silent() -> None:
    assert not await is_silent(lambda: asyncio.sleep(LEASE_S / 2), 4 * LEASE_S)
    answers = iter(range(1000))

    async def at_times() -> None:
        if next(answers) % 4:
            raise RayError("the link broke")

    assert not await is_silent(at_times, 4 * LEASE_S)


async def test_a_process_that_was_stopped_treats_no_peer_as_silent() -> None:
    answered = asyncio.Event()

    async def stop() -> None:
        await asyncio.sleep(LEASE_S * 0.75)  # nearly too late
        time.sleep(3 * LEASE_S)  # noqa: ASYNC251  # as by SIGSTOP: nothing of this process runs
        # What came meanwhile is read after the timers that lapsed.
        await asyncio.sleep(LEASE_S / 20)
        answered.set()

    stopped = asyncio.create_task(stop())
    assert not await is_silent(answered.wait, 4 * LEASE_S)
    await stopped


def test_a_process_starts_elsewhere_only_when_its_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "ab" * 28
    living = {here}
    monkeypatch.setattr(processes, "living_nodes", lambda: living)
    assert not on_node(here, or_elsewhere=True).soft, "a node that has just joined may not know of it: not elsewhere"
    living.clear()
    assert on_node(here, or_elsewhere=True).soft
    assert not on_node(here).soft, "its journal is a file there"
