"""Waiting for a condition, with a deadline: tests never sleep for a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], deadline_s: float, what: str) -> None:
    """Return when ``condition`` holds; fail with ``what`` when it does not in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s} s for {what}")
        await asyncio.sleep(0.01)
