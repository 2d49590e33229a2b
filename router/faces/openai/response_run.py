"""A response in progress, followed by any number of clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from holdfast.errors import HoldfastError
from router.turns.turn import TurnChunk


class ResponseRun:
    """A response that runs on this router: its output so far, for any number of followers."""

    def __init__(self) -> None:
        self.chunks: list[TurnChunk] = []
        self.error: HoldfastError | None = None
        self.done = False
        self._changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def changed(self) -> None:
        """Wake the followers."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self) -> AsyncGenerator[TurnChunk, None]:
        """All of its output, from the start. Raises the error it ended with."""
        at = 0
        while True:
            for chunk in self.chunks[at:]:
                yield chunk
                at += 1
            if at < len(self.chunks):
                continue
            if self.error is not None:
                raise self.error
            if self.done:
                return
            await self._changed.wait()
