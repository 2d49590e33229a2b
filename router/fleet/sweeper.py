"""Sweeps: have workers free the sessions that are no longer theirs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from holdfast.errors import HoldfastError, NoWorkerAvailable
from holdfast.v1 import session_pb2
from holdfast.wire import LAST_EPOCH
from router.fleet.link import WorkerLink
from router.journal.interface import Journal, Owner

log = logging.getLogger("holdfast.router")
SWEEP_RETRY_S = 0.5
SWEEP_EVERY_S = 30.0
"""All workers are swept: a turn that was sent before its session left may arrive at its former worker much later,
on a connection that was cut, and the release of a session's copies may die with the store that was to pass it on.
"""
NOWHERE = Owner("", LAST_EPOCH, released=True)
"""The owner of a session whose tombstone is gone too."""


class Sweeper:
    """Frees on workers what the journal says was released, or pinned to another worker; and on their nodes, copies
    of the KV of sessions that were released.

    A worker is swept whenever it is reached again, whenever it may have missed a call, and now and then: law L12
    holds on every living rank, including one that was unreachable.
    """

    def __init__(self, journal: Journal, timeout_s: float) -> None:
        self._journal = journal
        self._timeout_s = timeout_s
        self._sweeps: dict[str, asyncio.Task[None]] = {}
        self._repeats: asyncio.Task[None] | None = None

    def start(self, alive: Callable[[], Iterable[WorkerLink]]) -> None:
        """Sweep all workers now and then."""
        self._repeats = asyncio.create_task(self._repeat(alive))

    async def _repeat(self, alive: Callable[[], Iterable[WorkerLink]]) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            for link in alive():
                try:
                    await self._sweep_once(link)
                except HoldfastError as error:
                    log.info("worker %s is not swept now: %s", link.name, error.message)

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

    async def _sweep_once(self, link: WorkerLink) -> None:
        slots, copied = await link.slots(self._timeout_s)
        session_ids = list(dict.fromkeys([*slots, *(copied or ())]))
        owners, held = await self._journal.owners(session_ids), set(slots)
        for session_id in session_ids:
            owner = owners.get(session_id, NOWHERE)
            if owner.released or (owner.worker != link.name and session_id in held):
                # Under the epoch that the journal knows: what was sent under an earlier one is refused from now on,
                # and a session that is new under the same name is spared.
                now, moved = session_pb2.RELEASE_MODE_NOW, not owner.released
                await link.release(session_id, owner.epoch, now, self._timeout_s, moved=moved)
        if copied is None:
            raise NoWorkerAvailable("its node's KV store does not answer")

    async def close(self) -> None:
        tasks = [*self._sweeps.values(), *([self._repeats] if self._repeats is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
