"""Leases: how long a peer may be silent, counted only while this process runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SLICES = 4
"""A lease is this many slices, plus the one in which the last message arrived."""


async def silent_for(lease_s: float, heard: Callable[[], object]) -> None:
    """Returns when ``heard`` has not changed for a lease (at least 0.8 of one).

    A process that resumes after a pause must not treat its peers as dead: its timers have expired, and
    the messages that arrived meanwhile are still unread. So silence is counted in slices, and a slice
    that took far longer than its length is not counted.
    """
    loop, slice_s = asyncio.get_running_loop(), lease_s / (SLICES + 1)
    num_silent, last = 0, heard()
    while num_silent < SLICES:
        ends_at = loop.time() + slice_s
        await asyncio.sleep(slice_s)
        now = heard()
        if now != last:
            num_silent, last = 0, now
        elif loop.time() < ends_at + slice_s:
            num_silent += 1
