"""Starts the components of a cluster, and starts each again when it fails.

A component is a worker or a router. How one is started and ended is its own affair: on Ray
(``ray_backend``), or in the simulator. Every component has a task of its own here, so that none waits for
another: a router that is stopped does not delay a worker's restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from holdfast.errors import HoldfastError
from router.fleet.link import WorkerAddress

log = logging.getLogger("holdfast.cluster")
RESTART_PAUSE_S = 1.0
"""Pause after a failed start, so that a component that cannot start does not spin."""
ANNOUNCE_RETRY_S = 0.2
READY_POLL_S = 0.02


class Component(Protocol):
    """A part of the cluster that runs as one incarnation after another."""

    name: str

    async def failed(self) -> str:
        """Returns, with the reason, when the running incarnation must be replaced."""

    async def end(self) -> None:
        """End the running incarnation, whatever state it is in; returns when it is gone."""


class WorkerComponent(Component, Protocol):
    """A worker. ``address``: of the incarnation that serves now."""

    address: WorkerAddress | None

    async def start(self) -> None:
        """Start a new incarnation; returns when it serves. Raises HoldfastError."""


class RouterComponent(Component, Protocol):
    """A router. Its methods raise HoldfastError if the router does not answer."""

    @property
    def serves(self) -> bool: ...

    async def start(self, workers: list[WorkerAddress]) -> None:
        """Start another router; returns when it serves."""

    async def set_workers(self, workers: list[WorkerAddress]) -> None:
        """Replace the router's set of workers."""

    async def ready_workers(self) -> list[str]:
        """The workers that the router reaches."""

    async def rebalance(self, max_sessions: int) -> int:
        """Have the router migrate idle sessions to workers with few. Returns how many it migrated."""


class StoreComponents(Protocol):
    """The nodes' KV stores. Whether they live decides how fast sessions come back, and nothing else."""

    async def start(self) -> None:
        """Start all. Raises HoldfastError."""

    async def keep(self) -> None:
        """Look at all once, and start others for those that died."""


class Supervisor:
    """Keeps every component running, and announces the living workers to every router.

    ``start_timeout_s``: deadline of an incarnation's start. ``rebalance_per_s``: limit of sessions
    migrated a second, 0 for none.
    """

    def __init__(
        self,
        workers: Sequence[WorkerComponent],
        routers: Sequence[RouterComponent],
        *,
        start_timeout_s: float,
        rebalance_per_s: float,
        stores: StoreComponents | None = None,
    ) -> None:
        self._workers, self._routers, self._stores = workers, routers, stores
        self._start_timeout_s, self._rebalance_per_s = start_timeout_s, rebalance_per_s
        self._changed = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    def addresses(self) -> list[WorkerAddress]:
        """The workers that serve now."""
        return [worker.address for worker in self._workers if worker.address is not None]

    async def start(self) -> None:
        """Start every component and keep it running; returns when every router reaches every worker.

        Raises HoldfastError, or TimeoutError after ``start_timeout_s``.
        """
        async with asyncio.timeout(self._start_timeout_s):
            if self._stores is not None:
                await self._stores.start()
            # All at once: loading takes longest, and the components share the cores anyway.
            await asyncio.gather(
                *(worker.start() for worker in self._workers), *(router.start([]) for router in self._routers)
            )
            if self._stores is not None:
                await self._stores.start()  # those whose size the workers' tells
            for router in self._routers:
                await router.set_workers(self.addresses())
            for router in self._routers:
                while len(await router.ready_workers()) < len(self._workers):
                    await asyncio.sleep(READY_POLL_S)
        loops: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            *((worker.name, lambda worker=worker: self._watch_worker(worker)) for worker in self._workers),
            *((router.name, lambda router=router: self._watch_router(router)) for router in self._routers),
        ]
        if self._stores is not None:
            loops.append(("a KV store", self._stores.keep))
        if self._rebalance_per_s:
            loops.append(("rebalancing", self._rebalance))
        self._keepers = [asyncio.create_task(self._repeat(name, loop)) for name, loop in loops]

    async def stop(self) -> None:
        """Stop supervising. Running components continue."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    # ---- one task for each component ----------------------------------------------------------------

    async def _repeat(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Run ``loop`` again and again, whatever goes wrong in it."""
        while True:
            try:
                await loop()
            except (HoldfastError, TimeoutError) as error:
                log.error("%s does not start: %s; retrying", name, error)
                await asyncio.sleep(RESTART_PAUSE_S)
            except Exception:
                log.exception("%s: internal error of the supervisor; retrying", name)
                await asyncio.sleep(RESTART_PAUSE_S)

    async def _watch_worker(self, worker: WorkerComponent) -> None:
        """Wait until the worker fails, and start its next incarnation."""
        if worker.address is not None:
            log.warning("%s: %s; starting its next incarnation", worker.name, await worker.failed())
            worker.address = None
            self._workers_changed()
        await worker.end()
        async with asyncio.timeout(self._start_timeout_s):
            await worker.start()
        self._workers_changed()

    async def _watch_router(self, router: RouterComponent) -> None:
        """Announce the workers to the router until it fails, and start another."""
        if router.serves:
            announcing = asyncio.create_task(self._announce(router))
            try:
                log.warning("%s: %s; starting another", router.name, await router.failed())
            finally:
                announcing.cancel()
        await router.end()
        async with asyncio.timeout(self._start_timeout_s):
            await router.start(self.addresses())

    async def _announce(self, router: RouterComponent) -> None:
        """Announce the current workers after each change, so that a slow router misses none."""
        while True:
            changed = self._changed
            try:
                await router.set_workers(self.addresses())
            except HoldfastError as error:
                log.info("cannot announce the workers to %s: %s", router.name, error)
                await asyncio.sleep(ANNOUNCE_RETRY_S)
            else:
                await changed.wait()

    def _workers_changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _rebalance(self) -> None:
        """Have one router migrate some sessions, within the rate limit.

        One router acts for all: several that see the same imbalance would overshoot.
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
