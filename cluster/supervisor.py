"""Starts what a cluster is made of, and each part again when it breaks.

What a part is, and how it is started and ended, is the places' affair: Ray's (``ray_cluster``), or the
simulator's. Every part has a task of its own here, so that none waits for another: a router that is
stopped holds up no worker's restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from holdfast.errors import HoldfastError
from router.workers import WorkerAddress

log = logging.getLogger("holdfast.cluster")
RESTART_PAUSE_S = 1.0
"""Between a failed start and the next: what cannot start must not spin."""
TELL_PAUSE_S = 0.2
READY_POLL_S = 0.02


class Place(Protocol):
    """Where a part of the cluster lives, incarnation after incarnation."""

    name: str

    async def broken(self) -> str:
        """Returns, with the reason, when what runs here has to be replaced."""

    async def end(self) -> None:
        """End whatever runs here, in whatever state it is; returns when it is gone."""


class WorkerPlace(Place, Protocol):
    """A worker's. ``address``: of the incarnation that serves now."""

    address: WorkerAddress | None

    async def start(self) -> None:
        """Start a new incarnation; returns when it serves. Raises HoldfastError."""


class RouterPlace(Place, Protocol):
    """A router's. Its methods raise HoldfastError where the router does not answer."""

    @property
    def serves(self) -> bool: ...

    async def start(self, workers: list[WorkerAddress]) -> None:
        """Start another router; returns when it serves."""

    async def set_workers(self, workers: list[WorkerAddress]) -> None: ...

    async def ready_workers(self) -> list[str]:
        """The workers that it reaches."""

    async def rebalance(self, max_moves: int) -> int:
        """Have it move idle sessions to where there are few; returns how many moved."""


class Supervisor:
    """Keeps every place filled, and every router told of the workers that live.

    ``start_timeout_s``: how long an incarnation may take to serve; ``rebalance_per_s``: sessions that may
    move in a second, 0 for none.
    """

    def __init__(
        self,
        workers: Sequence[WorkerPlace],
        routers: Sequence[RouterPlace],
        *,
        start_timeout_s: float,
        rebalance_per_s: float,
    ) -> None:
        self._workers, self._routers = workers, routers
        self._start_timeout_s, self._rebalance_per_s = start_timeout_s, rebalance_per_s
        self._changed = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    def addresses(self) -> list[WorkerAddress]:
        """The workers that live now."""
        return [worker.address for worker in self._workers if worker.address is not None]

    async def start(self) -> None:
        """Start everything, and keep it; returns when every router reaches every worker.

        Raises HoldfastError, or TimeoutError after ``start_timeout_s``.
        """
        async with asyncio.timeout(self._start_timeout_s):
            # Together: loading is the slow part, and the cores share it anyway.
            await asyncio.gather(
                *(worker.start() for worker in self._workers), *(router.start([]) for router in self._routers)
            )
            for router in self._routers:
                await router.set_workers(self.addresses())
            for router in self._routers:
                while len(await router.ready_workers()) < len(self._workers):
                    await asyncio.sleep(READY_POLL_S)
        lives: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            *((worker.name, lambda worker=worker: self._live_as_worker(worker)) for worker in self._workers),
            *((router.name, lambda router=router: self._live_as_router(router)) for router in self._routers),
        ]
        if self._rebalance_per_s:
            lives.append(("rebalancing", self._rebalance))
        self._keepers = [asyncio.create_task(self._keep(name, live)) for name, live in lives]

    async def stop(self) -> None:
        """Start nothing any more; what runs goes on running."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    # ---- one task each ------------------------------------------------------------------------------

    async def _keep(self, name: str, live: Callable[[], Awaitable[None]]) -> None:
        """One life after another, for ever: whatever goes wrong in one, the place is not given up."""
        while True:
            try:
                await live()
            except (HoldfastError, TimeoutError) as error:
                log.error("%s does not start: %s; trying again", name, error)
                await asyncio.sleep(RESTART_PAUSE_S)
            except Exception:
                log.exception("%s: the supervisor's own mistake; trying again", name)
                await asyncio.sleep(RESTART_PAUSE_S)

    async def _live_as_worker(self, worker: WorkerPlace) -> None:
        """Wait until the worker breaks, and start its next incarnation."""
        if worker.address is not None:
            log.warning("%s: %s; starting its next incarnation", worker.name, await worker.broken())
            worker.address = None
            self._announce()
        await worker.end()
        async with asyncio.timeout(self._start_timeout_s):
            await worker.start()
        self._announce()

    async def _live_as_router(self, router: RouterPlace) -> None:
        """Keep the router told of the workers until it breaks, and start another."""
        if router.serves:
            telling = asyncio.create_task(self._tell(router))
            try:
                log.warning("%s: %s; starting another", router.name, await router.broken())
            finally:
                telling.cancel()
        await router.end()
        async with asyncio.timeout(self._start_timeout_s):
            await router.start(self.addresses())

    async def _tell(self, router: RouterPlace) -> None:
        """Again after each change, with what is true then; a router that answers late misses none."""
        while True:
            changed = self._changed
            try:
                await router.set_workers(self.addresses())
            except HoldfastError as error:
                log.info("%s was not told of the workers: %s", router.name, error)
                await asyncio.sleep(TELL_PAUSE_S)
            else:
                await changed.wait()

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _rebalance(self) -> None:
        """Have a router move some sessions, no faster than they may.

        One asks for all routers: several that saw the same imbalance would turn it round.
        """
        pause_s = max(1.0, 1 / self._rebalance_per_s)
        await asyncio.sleep(pause_s)
        router = next((router for router in self._routers if router.serves), None)
        if router is None:
            return
        try:
            await router.rebalance(max(1, int(self._rebalance_per_s * pause_s)))
        except HoldfastError as error:
            log.info("not rebalanced: %s", error)
