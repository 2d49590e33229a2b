"""When a peer that says nothing is taken for gone: leases, by the time in which one ran oneself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SLICES = 4
"""A lease is these, and the one in which the last word came."""


async def silent_for(lease_s: float, heard: Callable[[], object]) -> None:
    """Returns when ``heard`` has given the same for a lease (0.8 of one at least): nothing came.

    Who was stopped, or on a machine that was, must not take that for the silence of all others: its timers
    have lapsed when it wakes, and what came meanwhile is still to be read. So silence is counted in slices,
    and one that took far longer than it should is not counted.
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
