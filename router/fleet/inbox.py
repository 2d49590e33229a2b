"""What a worker sends of one turn, for the task that waits for it."""

from __future__ import annotations

import asyncio
from collections import deque

from holdfast.v1 import worker_pb2


class TurnInbox:
    """Updates of one turn. None: the worker was lost.

    Each token of each turn is waited for here, so there is one future and one timer, which takes half as long as
    asyncio's queue in its ``timeout``.
    """

    def __init__(self) -> None:
        self._updates: deque[worker_pb2.TurnUpdate | None] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, update: worker_pb2.TurnUpdate | None) -> None:
        """Add an update. In the event loop."""
        self._updates.append(update)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self, timeout_s: float) -> worker_pb2.TurnUpdate | None:
        """The next update. One task at a time may wait. Raises TimeoutError."""
        if not self._updates:
            loop = asyncio.get_running_loop()
            self._reader = reader = loop.create_future()
            timer = loop.call_later(max(0.0, timeout_s), _expire, reader)
            try:
                await reader
            finally:
                timer.cancel()
                self._reader = None
        return self._updates.popleft()


def _expire(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_exception(TimeoutError())
