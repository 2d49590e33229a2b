"""A supervisor's view of routers and workers, in place of actors on Ray, and the supervisors themselves."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence

from cluster.leadership import Leadership, stand
from cluster.supervisor import StoreComponents, Supervisor
from holdfast.errors import HoldfastError
from router.fleet.link import WorkerAddress
from router.journal.interface import ROUTER_LEASE_S
from router.journal.supervision import SqliteLease
from tests.simulation.components import NameTaken, Router, Worker, died_or_silent
from tests.simulation.loop import Process
from tests.simulation.network import NOBODY
from tests.simulation.world import World

CUT_OFF_S = (3.0, 10.0)
"""Until a node that is cut off ends what runs on it."""
RETRY_S = 1.0
START_TIMEOUT_S = 20.0
DRAIN_S = 1.0


class SimulatedLease(SqliteLease):
    """The real statements on the simulated disk of the journal."""

    def __init__(self, world: World) -> None:
        super().__init__(world.disk)  # type: ignore[arg-type]
        self._world = world

    async def _fetch(self, statement: str, values: tuple[object, ...]) -> object:
        world = self._world
        await asyncio.sleep(world.rng.uniform(*world.disk.latency_s))
        fetched = self._fetch_now(statement, values)
        await asyncio.sleep(world.rng.uniform(*world.disk.latency_s))
        return fetched


class SupervisedRouter:
    """``acts``: called before the supervisor starts or ends anything."""

    def __init__(self, router: Router, acts: Callable[[str], None]) -> None:
        self._router, self._world, self._acts = router, router.world, acts
        self.name = router.name
        self.serves = False
        self._process: Process | None = None

    async def adopt(self) -> bool:
        router = self._router
        self._process = router.process if router.incarnation else None
        self.serves = self._process is not None and router.core is not None and answers(self._world, self._process)
        return self.serves

    async def start(self, workers: list[WorkerAddress], epoch: int) -> None:
        self._acts(f"starts {self.name}")
        try:
            await self._router.start(workers, epoch)
        except NameTaken:
            self._process = self._router.process
            raise
        self._process, self.serves = self._router.process, True

    async def set_workers(self, workers: list[WorkerAddress], epoch: int) -> None:
        core = self._router.serving(self._process)
        await self._router.ask(self._router.process, core.fleet.set_workers(workers, epoch))

    async def ready_workers(self) -> list[str]:
        return [link.name for link in self._router.serving(self._process).fleet.alive()]

    async def rebalance(self, max_sessions: int) -> int:
        core = self._router.serving(self._process)
        num_migrated = await self._router.ask(self._router.process, core.migrator.rebalance(max_sessions))
        self._world.sessions_migrated += num_migrated
        return num_migrated

    async def drain(self, name: str, timeout_s: float) -> None:
        core = self._router.serving(self._process)
        drained = await self._router.ask(self._router.process, core.migrator.drain(name, timeout_s))
        self._world.sessions_migrated += drained["sessions_migrated"]
        self._world.drained.add(name)

    async def failed(self) -> str:
        assert self._process is not None, "it serves"
        return await died_or_silent(self._world, [self._process], self._process, 2 * ROUTER_LEASE_S)

    async def end(self) -> None:
        self._acts(f"ends {self.name}")
        self.serves = False
        if self._process is not None:
            self._world.kill(self._process)


class SupervisedWorker:
    """``acts``: called before the supervisor starts or ends anything."""

    waits_for = ""

    def __init__(self, worker: Worker, acts: Callable[[str], None]) -> None:
        self._worker, self._world, self._acts = worker, worker.world, acts
        self.name = worker.name
        self.address: WorkerAddress | None = None
        self._ranks: list[Process] = []

    async def adopt(self) -> bool:
        worker = self._worker
        self._ranks = worker.ranks
        serves = worker.address is not None and all(answers(self._world, rank) for rank in self._ranks)
        self.address = worker.address if serves else None
        return serves

    async def start(self) -> None:
        self._acts(f"starts {self.name}")
        worker = self._worker
        try:
            await worker.start()
        except NameTaken:
            self._ranks = worker.ranks
            raise
        self._ranks, self.address = worker.ranks, worker.address

    async def failed(self) -> str:
        silence_s = self._world.engine_config.rank_lease_s
        return await died_or_silent(self._world, self._ranks, self._ranks[0], silence_s)

    async def end(self) -> None:
        self._acts(f"ends {self.name}")
        self.address = None
        if self._ranks is self._worker.ranks:
            self._worker.address = None
        for rank in self._ranks:
            if self._world.reaches(rank):
                self._world.kill(rank)
            else:
                after_s = self._world.rng.uniform(*CUT_OFF_S)
                self._world.loop.call_later(after_s, self._world.kill, rank, context=NOBODY.copy())


class SimulatedInherited:
    """A worker of the generation before, which no supervisor keeps any more."""

    def __init__(self, worker: Worker, has_room: bool, acts: Callable[[str], None] = lambda what: None) -> None:
        assert worker.address is not None, "it serves"
        self._worker, self._ranks, self._acts = worker, list(worker.ranks), acts
        self.name, self.address, self.has_room = worker.name, worker.address, has_room

    def seen_by(self, acts: Callable[[str], None]) -> SimulatedInherited:
        """As one supervisor has it."""
        seen = copy.copy(self)
        seen._acts = acts
        return seen

    def runs(self) -> bool:
        return all(rank.alive for rank in self._ranks)

    async def end(self) -> None:
        self._acts(f"ends {self.address.name}")
        world = self._worker.world
        if self.runs() and self.address.name not in world.drained:
            world.violated(f"{self.address.name} was ended before its sessions had moved")
        for rank in self._ranks:
            world.kill(rank)


def answers(world: World, process: Process) -> bool:
    """Whether a supervisor that looks for it finds it."""
    return process.alive and not process.paused and world.reaches(process)


class SupervisorSlot:
    """One of two supervisors: a process after another. Each stands for the lease, and leads while it has it."""

    def __init__(self, world: World, index: int, routers: Sequence[Router], stores: StoreComponents) -> None:
        self._world, self.name, self._number = world, f"supervisor{index}", 0
        self._routers, self._stores = routers, stores
        self.process: Process

    def start(self, workers: Sequence[Worker], inherited: Sequence[SimulatedInherited]) -> None:
        """Start a supervisor of the generation that has these workers."""
        self._workers, self._inherited = workers, inherited
        self._number += 1
        self.process = Process(f"{self.name}#{self._number}", self.name)
        self._leadership = Leadership(SimulatedLease(self._world), self.process.name)
        self.process.spawn(stand(self._leadership, self._lead))

    async def _lead(self) -> None:
        stores = self._stores if self._world.engine_config.kv_store is not None else None
        supervisor = Supervisor(
            [SupervisedWorker(worker, self._acts) for worker in self._workers],
            [SupervisedRouter(router, self._acts) for router in self._routers],
            start_timeout_s=START_TIMEOUT_S,
            rebalance_per_s=2.0,
            stores=stores,
            leadership=self._leadership,
            inherited=[worker.seen_by(self._acts) for worker in self._inherited],
            drain_timeout_s=DRAIN_S,
        )
        try:
            while True:
                self._leadership.check()
                try:
                    if await supervisor.adopt():
                        supervisor.keep()
                    else:
                        await supervisor.start()
                    await asyncio.Future()
                except (HoldfastError, TimeoutError) as error:
                    self._world.trace(f"{self.process.name}: the cluster does not start: {error}")
                    await asyncio.sleep(RETRY_S)
        finally:
            await supervisor.stop()

    def _acts(self, what: str) -> None:
        """Law L16: one supervisor acts. Others know by then that they lead no longer."""
        row = self._world.disk.db.execute("SELECT holder, epoch FROM supervisor").fetchone()
        if row != (self.process.name, self._leadership.epoch):
            self._world.violated(f"L16: {self.process.name} {what}, and {row[0]} leads")
