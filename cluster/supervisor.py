"""Starts the components of a cluster, and starts each again when it fails.

A component is a worker or a router. How one is started and ended is its own affair: on Ray
(``ray_backend``), or in the simulator. Every component has a task of its own here, so that none waits for
another: a router that is stopped does not delay a worker's restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from cluster.leadership import Leadership
from holdfast.errors import HoldfastError, NoWorkerAvailable, StaleEpoch, WorkerNotFound
from router.fleet.link import WorkerAddress

log = logging.getLogger("holdfast.cluster")
RESTART_PAUSE_S = 1.0
"""Pause after a failed start, so that a component that cannot start does not spin."""
SETTLE_S = 1.0
"""From a worker's end to the start of its next incarnation, which takes many times as long. What starts keeps cores
busy, and the turns that are failing over need them first: clients wait for those.
"""
ANNOUNCE_RETRY_S = 0.2
READY_POLL_S = 0.02


class Component(Protocol):
    """A part of the cluster that runs as one incarnation after another."""

    name: str

    async def adopt(self) -> bool:
        """Find the incarnation that another supervisor has started. Returns whether it serves; if not, ``end`` ends
        what there is of it.
        """

    async def failed(self) -> str:
        """Returns, with the reason, when the running incarnation must be replaced."""

    async def end(self) -> None:
        """End the running incarnation, whatever state it is in; returns when it is gone."""


class WorkerComponent(Component, Protocol):
    """A worker. ``address``: of the incarnation that serves now."""

    address: WorkerAddress | None

    async def start(self) -> None:
        """Start a new incarnation; returns when it serves. Raises HoldfastError."""

    @property
    def waits_for(self) -> str:
        """What the start under way, or the last one, has waited for and has not got; empty: nothing."""


class RouterComponent(Component, Protocol):
    """A router. Its methods raise HoldfastError if the router does not answer."""

    @property
    def serves(self) -> bool: ...

    async def start(self, workers: list[WorkerAddress], epoch: int) -> None:
        """Start another router; returns when it serves."""

    async def set_workers(self, workers: list[WorkerAddress], epoch: int) -> None:
        """Replace the router's set of workers. Raises StaleEpoch if it was told one under a later epoch."""

    async def ready_workers(self) -> list[str]:
        """The workers that the router reaches."""

    async def rebalance(self, max_sessions: int) -> int:
        """Have the router migrate idle sessions to workers with few. Returns how many it migrated."""

    async def drain(self, name: str, timeout_s: float) -> None:
        """Have a worker admit no more turns, and migrate its sessions; turns may go on for ``timeout_s``.

        ``name``: as in pins. Raises WorkerNotFound if the router does not reach it.
        """


class InheritedWorker(Protocol):
    """A worker of the generation before, which serves until one of this generation has its sessions.

    ``name``: of the worker that takes its place. ``has_room``: whether that one can start beside it.
    """

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> WorkerAddress: ...

    @property
    def has_room(self) -> bool: ...

    def runs(self) -> bool: ...

    async def end(self) -> None:
        """End its processes, whatever state they are in; returns when they are gone."""


class StoreComponents(Protocol):
    """The nodes' KV stores. Whether they live decides how fast sessions come back, and nothing else."""

    async def start(self) -> None:
        """Start all that are missing. Raises HoldfastError."""

    async def keep(self) -> None:
        """Look at all once, and start others for those that died."""


class Supervisor:
    """Keeps every component running, and announces the living workers to every router.

    ``start_timeout_s``: deadline of an incarnation's start. ``rebalance_per_s``: limit of sessions
    migrated a second, 0 for none. ``leadership``: of several supervisors, the one that has it acts; None: there is
    one. ``inherited``: what the generation before this one has left, whose turns may go on for ``drain_timeout_s``.
    """

    def __init__(
        self,
        workers: Sequence[WorkerComponent],
        routers: Sequence[RouterComponent],
        *,
        start_timeout_s: float,
        rebalance_per_s: float,
        stores: StoreComponents | None = None,
        leadership: Leadership | None = None,
        inherited: Sequence[InheritedWorker] = (),
        drain_timeout_s: float = 0.0,
    ) -> None:
        self._leadership = leadership
        self._inherited = {worker.name: worker for worker in inherited if worker.runs()}
        self._drain_timeout_s, self._draining = drain_timeout_s, asyncio.Lock()
        self._workers, self._routers, self._stores = workers, routers, stores
        self._start_timeout_s, self._rebalance_per_s = start_timeout_s, rebalance_per_s
        self._changed = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    def addresses(self) -> list[WorkerAddress]:
        """The workers that serve now."""
        inherited = [worker.address for worker in self._inherited.values() if worker.runs()]
        return inherited + [worker.address for worker in self._workers if worker.address is not None]

    @property
    def num_inherited(self) -> int:
        """Workers of the generation before that serve yet."""
        return len(self._inherited)

    async def start(self) -> None:
        """Start every component and keep it running; returns when every router reaches every worker.

        Raises HoldfastError, after ``start_timeout_s`` too.
        """
        async with _deadline(self._start_timeout_s, self._missing):
            if self._stores is not None:
                await self._stores.start()
            # All at once: loading takes longest, and the components share the cores anyway.
            await _together(
                *(worker.start() for worker in self._workers if worker.name not in self._inherited),
                *(router.start(self.addresses(), self._epoch) for router in self._routers),
            )
            if self._stores is not None:
                await self._stores.start()  # those whose size the workers' tells
            for router in self._routers:
                await router.set_workers(self.addresses(), self._epoch)
            for router in self._routers:
                while not await self._reaches_all(router):
                    await asyncio.sleep(READY_POLL_S)
        self.keep()

    async def adopt(self) -> bool:
        """Find what another supervisor has started, for ``keep``. Returns False, with all ended, if nothing serves."""
        found = await asyncio.gather(*(component.adopt() for component in (*self._workers, *self._routers)))
        if not any(found):
            await asyncio.gather(*(component.end() for component in (*self._workers, *self._routers)))
            return False
        names = [c.name for c, serves in zip((*self._workers, *self._routers), found, strict=True) if serves]
        log.warning("took over %s", ", ".join(names))
        return True

    def keep(self) -> None:
        """Keep running what serves, and start the rest, a task for each component: see ``wait_until_whole``."""
        loops: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            *((worker.name, lambda worker=worker: self._watch_worker(worker)) for worker in self._workers),
            *((router.name, lambda router=router: self._watch_router(router)) for router in self._routers),
        ]
        if self._stores is not None:
            loops.append(("a KV store", self._keep_stores))
        if self._rebalance_per_s:
            loops.append(("rebalancing", self._rebalance))
        self._keepers = [asyncio.create_task(self._repeat(name, loop)) for name, loop in loops]

    async def wait_until_whole(self) -> None:
        """Returns when every component serves, and every router reaches every worker. Call after ``keep``.

        Raises NoWorkerAvailable after ``start_timeout_s``, saying what does not serve.
        """
        async with _deadline(self._start_timeout_s, self._missing):
            while not await self._is_whole():
                await asyncio.sleep(READY_POLL_S)

    async def _is_whole(self) -> bool:
        if self._not_serving():
            return False
        try:
            return all([await self._reaches_all(router) for router in self._routers])
        except HoldfastError:  # it has just failed
            return False

    def _not_serving(self) -> list[str]:
        served = {address.worker_id for address in self.addresses()}
        workers = [_described(worker) for worker in self._workers if worker.name not in served]
        return workers + [router.name for router in self._routers if not router.serves]

    def _missing(self) -> str:
        return ", ".join(self._not_serving()) or "connections of routers to workers"

    async def _reaches_all(self, router: RouterComponent) -> bool:
        return len(await router.ready_workers()) >= len(self.addresses())

    @property
    def _epoch(self) -> int:
        return self._leadership.epoch if self._leadership is not None else 0

    def _check(self) -> None:
        """Call before every act. Raises StaleEpoch when this supervisor leads no longer."""
        if self._leadership is not None:
            self._leadership.check()

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
            except StaleEpoch as error:
                log.warning("%s is kept by another supervisor: %s", name, error)
                await asyncio.sleep(RESTART_PAUSE_S)
            except HoldfastError as error:
                log.error("%s does not start: %s; retrying", name, error)
                await asyncio.sleep(RESTART_PAUSE_S)
            except Exception:
                log.exception("%s: internal error of the supervisor; retrying", name)
                await asyncio.sleep(RESTART_PAUSE_S)

    async def _watch_worker(self, worker: WorkerComponent) -> None:
        """Wait until the worker fails, and start its next incarnation."""
        old = self._inherited.get(worker.name)
        if old is not None:
            await self._succeed(old, worker)
        if worker.address is not None:
            reason = await worker.failed()
            self._check()
            log.warning("%s: %s; starting its next incarnation", worker.name, reason)
            worker.address = None
            self._workers_changed()
            await worker.end()
            await asyncio.sleep(SETTLE_S)
        await self._start_worker(worker)

    async def _start_worker(self, worker: WorkerComponent) -> None:
        self._check()
        await worker.end()
        self._check()
        async with _deadline(self._start_timeout_s, lambda: _described(worker)):
            await worker.start()
        self._workers_changed()

    async def _succeed(self, old: InheritedWorker, worker: WorkerComponent) -> None:
        """Give a worker of the generation before a successor: its sessions migrate before it ends.

        One after another: the others serve meanwhile.
        """
        async with self._draining:
            if old.has_room and worker.address is None:
                await self._start_worker(worker)
            await self._drain(old)
            self._check()
            await old.end()
            del self._inherited[old.name]
            self._workers_changed()
            if worker.address is None:
                await self._start_worker(worker)

    async def _drain(self, old: InheritedWorker) -> None:
        """Have the sessions of an inherited worker migrate to those that routers know of. Raises HoldfastError."""
        router = next((router for router in self._routers if router.serves), None)
        if router is None:
            raise NoWorkerAvailable(f"no router serves that could drain {old.address.name}")
        await router.set_workers(self.addresses(), self._epoch)
        while old.runs():
            try:
                await router.drain(old.address.name, self._drain_timeout_s)
                return
            except WorkerNotFound:
                await asyncio.sleep(READY_POLL_S)  # not reached yet, or it is just dying

    async def _watch_router(self, router: RouterComponent) -> None:
        """Announce the workers to the router until it fails, and start another."""
        if router.serves:
            announcing = asyncio.create_task(self._announce(router))
            try:
                reason = await router.failed()
            finally:
                announcing.cancel()
            self._check()
            log.warning("%s: %s; starting another", router.name, reason)
        self._check()
        await router.end()
        self._check()
        async with _deadline(self._start_timeout_s, lambda: router.name):
            await router.start(self.addresses(), self._epoch)

    async def _announce(self, router: RouterComponent) -> None:
        """Announce the current workers after each change, so that a slow router misses none."""
        while True:
            changed = self._changed
            try:
                await router.set_workers(self.addresses(), self._epoch)
            except HoldfastError as error:
                log.info("cannot announce the workers to %s: %s", router.name, error)
                await asyncio.sleep(ANNOUNCE_RETRY_S)
            else:
                await changed.wait()

    def _workers_changed(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _keep_stores(self) -> None:
        assert self._stores is not None
        self._check()
        await self._stores.keep()

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


def _described(worker: WorkerComponent) -> str:
    return f"{worker.name} (waits for {worker.waits_for})" if worker.waits_for else worker.name


@asynccontextmanager
async def _deadline(timeout_s: float, missing: Callable[[], str]) -> AsyncIterator[None]:
    """Of a start. Raises NoWorkerAvailable with what is missing."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise NoWorkerAvailable(f"not ready within {timeout_s:g} s: {missing()}") from None


async def _together(*starts: Coroutine[Any, Any, None]) -> None:
    """Wait for all; when one fails, none of the others goes on."""
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
