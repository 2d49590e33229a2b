"""Several turns of one HTTP request, side by side and without a session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from holdfast.errors import HoldfastError
from router.core import RouterCore
from router.faces.http import collect
from router.turns.turn import TurnChunk, TurnRequest

MAX_TURNS = 128


async def collect_all(core: RouterCore, requests: Sequence[TurnRequest]) -> list[tuple[TurnChunk, str]]:
    """Each turn's merged chunks and whole text. If one fails, the others end."""
    tasks = [asyncio.create_task(collect(core.gateway.run(request))) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def side_by_side(
    core: RouterCore, requests: Sequence[TurnRequest]
) -> AsyncGenerator[tuple[int, TurnChunk], None]:
    """The chunks of all turns as they come, each with its choice. Raises the first turn's error."""
    queue: asyncio.Queue[tuple[int, TurnChunk] | BaseException] = asyncio.Queue()

    async def run(choice: int, request: TurnRequest) -> None:
        try:
            async with contextlib.aclosing(core.gateway.run(request)) as stream:
                async for chunk in stream:
                    queue.put_nowait((choice, chunk))
        except HoldfastError as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(run(choice, request)) for choice, request in enumerate(requests)]
    try:
        unfinished = len(requests)
        while unfinished:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            unfinished -= bool(item[1].finish_reason)
            yield item
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def first_of(chunks: AsyncGenerator[tuple[int, TurnChunk], None]) -> tuple[int, TurnChunk]:
    """The first chunk. Errors before it can still be answered with their HTTP status."""
    try:
        return await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise
