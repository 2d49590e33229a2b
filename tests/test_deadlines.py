"""Calls that have so long to answer."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.deadlines import within


async def test_a_cancellation_in_the_moment_of_the_result_is_kept() -> None:
    answer = asyncio.get_running_loop().create_future()
    asking = asyncio.create_task(within(10, answer))
    await asyncio.sleep(0)
    answer.set_result("late")
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_a_call_that_does_not_end_in_time_is_cancelled() -> None:
    answer = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await within(0.01, answer)
    assert answer.cancelled()


async def test_what_is_there_needs_no_time() -> None:
    waiting: asyncio.Queue[int] = asyncio.Queue()
    waiting.put_nowait(1)
    assert await within(-1, waiting.get()) == 1
