"""Sets of workers that supervisors announce at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.harness import running
from tests.waiting import until


async def test_the_set_that_is_announced_last_stands_whatever_is_being_closed(tmp_path: Path) -> None:
    async with running(tmp_path) as harness:
        fleet, (first, second) = harness.router.core.fleet, harness.addresses.values()
        for _ in range(20):
            sets = ([first], [second], [first, second], [second], [first])
            await asyncio.gather(*(fleet.set_workers(addresses) for addresses in sets))
            assert set(fleet._links) == {first.name}
        await fleet.set_workers([first, second])
        await until(lambda: len(fleet.alive()) == 2, 20, "workers to be reached")
