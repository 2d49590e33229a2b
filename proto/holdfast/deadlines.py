"""Calls that have so long to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, call: Awaitable[T]) -> T:
    """The result of ``call``; a result that is there at once is returned in any case. Raises TimeoutError.

    ``asyncio.wait_for`` loses the cancellation of a task whose call ends in the same moment, before Python 3.12
    (https://github.com/python/cpython/issues/86296): a loop that was cancelled then runs on.
    """
    async with asyncio.timeout(seconds):
        return await call
