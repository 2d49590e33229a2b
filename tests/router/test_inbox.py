"""What a turn waits for."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.v1.worker_pb2 import TurnUpdate
from router.fleet.inbox import TurnInbox


async def test_updates_come_in_order_whether_they_were_waited_for_or_not() -> None:
    inbox = TurnInbox()
    reading = asyncio.create_task(inbox.get(30.0))
    await asyncio.sleep(0)
    sent = [TurnUpdate(turn_id=str(i)) for i in range(3)]
    for update in sent:
        inbox.put(update)
    assert await reading is sent[0]
    assert [await inbox.get(0.0), await inbox.get(-1.0)] == sent[1:], "what is there is not waited for"
    inbox.put(None)
    assert await inbox.get(30.0) is None


async def test_a_wait_ends_and_loses_no_update() -> None:
    inbox, update = TurnInbox(), TurnUpdate()
    for timeout_s in (0.01, 0.0, -1.0):
        with pytest.raises(TimeoutError):
            await inbox.get(timeout_s)
    reading = asyncio.create_task(inbox.get(30.0))
    await asyncio.sleep(0)
    reading.cancel()
    inbox.put(update)  # before the task has heard of it
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert await inbox.get(0.0) is update
