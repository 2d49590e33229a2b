"""Whose silence is death, and whose only seems so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from cluster.processes import SLICES, silence_of

SILENCE_S = 0.4


async def is_silent(probe: Callable[[], Awaitable[None]], within_s: float) -> bool:
    with_deadline = asyncio.wait_for(silence_of(probe, SILENCE_S), within_s)
    return (await asyncio.gather(with_deadline, return_exceptions=True))[0] is None


async def never() -> None:
    await asyncio.Event().wait()


async def refused() -> None:
    raise ConnectionError("nobody listens")


@pytest.mark.parametrize("probe", [never, refused])
async def test_who_never_answers_is_silent(probe: Callable[[], Awaitable[None]]) -> None:
    assert await is_silent(probe, 10 * SILENCE_S)


async def test_who_answers_late_or_at_times_is_not() -> None:
    async def late() -> None:
        await asyncio.sleep(SILENCE_S / SLICES * 1.5)

    assert not await is_silent(late, 4 * SILENCE_S)
    answers = iter(range(1000))

    async def at_times() -> None:
        if next(answers) % (SLICES - 1):
            raise ConnectionError("the link broke")

    assert not await is_silent(at_times, 4 * SILENCE_S)


async def test_who_was_stopped_itself_hears_of_nobody_meanwhile() -> None:
    answered = asyncio.Event()

    async def stop() -> None:
        await asyncio.sleep(SILENCE_S * 0.9)  # in the last moment
        time.sleep(3 * SILENCE_S)  # noqa: ASYNC251  # nothing of this process runs
        # What came meanwhile is read after the timers that lapsed.
        await asyncio.sleep(SILENCE_S / SLICES / 2)
        answered.set()

    stopped = asyncio.create_task(stop())
    assert not await is_silent(answered.wait, 4 * SILENCE_S)
    await stopped
