"""Sweeps: have workers free the sessions that are no longer theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from holdfast.errors import HoldfastError, NoWorkerAvailable
from holdfast.v1 import session_pb2
from holdfast.wire import LAST_EPOCH
from router.fleet.link import WorkerLink
from router.journal.interface import Journal

log = logging.getLogger("holdfast.router")
SWEEP_RETRY_S = 0.5
SWEEP_EVERY_S = 30.0
"""Copies of released sessions are looked for: a release may have died with the store that was to pass it on."""


class Sweeper:
    """Frees on workers what the journal says was released, or pinned to another worker; and on their nodes, copies
    of the KV of sessions that were released.

    A worker is swept whenever it is reached again, and whenever it may have missed a call: law L12 holds
    on every living rank, including one that was unreachable.
    """

    def __init__(self, journal: Journal, timeout_s: float) -> None:
        self._journal = journal
        self._timeout_s = timeout_s
        self._sweeps: dict[str, asyncio.Task[None]] = {}
        self._repeats: asyncio.Task[None] | None = None

    def start(self, alive: Callable[[], Iterable[WorkerLink]]) -> None:
        """Look at all workers' copies now and then."""
        self._repeats = asyncio.create_task(self._repeat(alive))

    async def _repeat(self, alive: Callable[[], Iterable[WorkerLink]]) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            for link in alive():
                if link.stats.HasField("kv_store"):
                    try:
                        await self._sweep_once(link, slots_too=False)
                    except HoldfastError as error:
                        log.info("copies near worker %s are not swept now: %s", link.name, error.message)

    def sweep(self, link: WorkerLink) -> None:
        """Sweep a worker in the background."""
        running = self._sweeps.get(link.name)
        self._sweeps[link.name] = asyncio.create_task(self._sweep(link, running))

    async def _sweep(self, link: WorkerLink, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            previous.cancel()  # this sweep does its work too
        while link.alive:
            try:
                await self._sweep_once(link)
                break
            except HoldfastError as error:
                log.info("worker %s is not swept yet: %s", link.name, error.message)
            await asyncio.sleep(SWEEP_RETRY_S)
        if self._sweeps.get(link.name) is asyncio.current_task():
            del self._sweeps[link.name]

    async def _sweep_once(self, link: WorkerLink, *, slots_too: bool = True) -> None:
        slots, copied = await link.slots(self._timeout_s)
        session_ids = list(dict.fromkeys([*slots, *(copied or ())]))
        owners, held = await self._journal.owners(session_ids), set(slots)
        for session_id in session_ids:
            worker, epoch = owners.get(session_id, ("", LAST_EPOCH))
            if worker != link.name and ((session_id in held and slots_too) or session_id not in owners):
                moved, now = session_id in owners, session_pb2.RELEASE_MODE_NOW
                await link.release(session_id, epoch, now, self._timeout_s, moved=moved)
        if copied is None:
            raise NoWorkerAvailable("its node's KV store does not answer")

    async def close(self) -> None:
        tasks = [*self._sweeps.values(), *([self._repeats] if self._repeats is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
