"""Results of the engine's thread, awaited in the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def result_of(future: Future[T]) -> T:
    """The future's result. Cancelling the caller does not cancel the future, which others may await too."""
    return await asyncio.shield(asyncio.wrap_future(future))
