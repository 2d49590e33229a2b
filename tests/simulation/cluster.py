"""A cluster of simulated processes that run Holdfast's own code: supervisor, routers, leaders, followers.

Only the edges are replaced: gRPC (``network``), threads (``engine``), the clock, randomness, the disk under
SQLite (``disk``), the model (``model``), and Ray (``components``).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from grpc_reflection.v1alpha import reflection

import cluster.leadership
import router.fleet.migration
import router.journal.sqlite_store
import router.journal.supervision
import router.turns.dispatch
import router.turns.prepare
import router.turns.relay
import router.turns.sessions
import workers.engine.admission
import workers.engine.drafts
import workers.engine.epochs
import workers.engine.follower
import workers.engine.leader
import workers.engine.pace
import workers.serving.bandwidth
import workers.serving.importer
import workers.serving.page_copies
import workers.serving.rank_server
import workers.serving.turn_loads
import workers.serving.worker_server
import workers.store.client
import workers.store.disk
from cluster.supervisor import Supervisor
from tests.simulation.components import POLL_S, ROUTER_PORTS, Router, Worker
from tests.simulation.engine import InThisThread, SimulatedFollower, SimulatedLeader, SimulatedLinks
from tests.simulation.loop import PROCESS, Process, SimulatedLoop
from tests.simulation.model import SimulatedRank
from tests.simulation.network import NOBODY, Network
from tests.simulation.store import FailingSegments, SimulatedClient, Stores, store_address
from tests.simulation.supervised import (
    START_TIMEOUT_S,
    SimulatedInherited,
    SupervisedRouter,
    SupervisedWorker,
    SupervisorSlot,
)
from tests.simulation.world import World

MIN_LOAD_TOKENS = 6
"""Sessions are short here."""
SUPERVISOR_CHECK_S = 4.0
START_WITHIN_S = 100.0
"""Faults that keep a cluster from starting are over long before."""


class Cluster(World):
    """Routers, workers and their supervisors: one, or two of which one leads."""

    def __init__(
        self,
        loop: SimulatedLoop,
        rng: random.Random,
        tp: int,
        trace: Callable[[str], None],
        disks: Path | None,
        num_supervisors: int,
    ) -> None:
        super().__init__(loop, rng, trace)
        self.routers = [Router(self, i) for i in range(len(ROUTER_PORTS))]
        self.workers = [Worker(self, i, tp) for i in range(2)]
        self.stores = Stores(self, disks)
        given = (self.routers, self.stores)
        self._slots = [SupervisorSlot(self, i, *given) for i in range(num_supervisors)] if num_supervisors > 1 else []
        self._inherited: list[SimulatedInherited] = []
        self._before: list[Worker] = []

    @property
    def has_standby(self) -> bool:
        return bool(self._slots)

    def waits_for_a_lost_worker(self, turn_id: str) -> bool:
        """Whether a router holds a turn at a worker that it has lost."""
        cores = [router.core for router in self.routers if router.core is not None]
        turns = [core.live._turns["", turn_id] for core in cores if core.live.has("", turn_id)]
        return any(turn.link is not None and not turn.link.alive for turn in turns)

    async def start(self) -> None:
        """Start everything, as often as it takes."""
        if self._slots:
            for slot in self._slots:
                slot.start(self.workers, self._inherited)
            self.supervisors = [slot.process for slot in self._slots]
            return
        ends_at = self.loop.time() + START_WITHIN_S
        while self.loop.time() < ends_at:
            process = Process("supervisor", "supervisor")
            self.supervisors = [process]
            stores = self.stores if self.engine_config.kv_store is not None else None
            supervisor = Supervisor(
                [SupervisedWorker(worker, lambda what: None) for worker in self.workers],
                [SupervisedRouter(router, lambda what: None) for router in self.routers],
                start_timeout_s=START_TIMEOUT_S,
                rebalance_per_s=2.0,
                stores=stores,
            )
            started = process.spawn(supervisor.start())
            while process.alive and not started.done():
                await asyncio.sleep(POLL_S)
            if not process.alive or not started.exception():
                return
            self.trace(f"the cluster does not start: {started.exception()}")
            self.kill_all()
        self.violated(f"L13: the cluster did not start within {START_WITHIN_S} s")

    async def keep_supervisors(self) -> None:
        """Start another supervisor for one that died, some time after."""
        while True:
            await asyncio.sleep(SUPERVISOR_CHECK_S)
            for slot in self._slots:
                if not slot.process.alive:
                    slot.start(self.workers, self._inherited)
            if self._slots:
                self.supervisors = [slot.process for slot in self._slots]

    def next_generation(self) -> None:
        """Other supervisors, which start workers of their own beside those that there are, and end those."""
        if any(worker.runs() for worker in self._inherited):
            return  # one after another
        self.trace("the next generation takes over")
        has_room = self.rng.random() < 0.7
        serving = [worker for worker in self.workers if worker.address is not None and worker.is_taken()]
        self._inherited = [SimulatedInherited(worker, has_room) for worker in serving]
        self._before, before = self.workers, self.workers
        self.workers = [Worker(self, worker.index, worker.size, worker) for worker in before]
        for worker in before:
            for rank in worker.ranks if worker not in serving else ():
                self.kill(rank)  # it was just starting: nobody takes it over
        for slot in self._slots:
            self.kill(slot.process)
            slot.start(self.workers, self._inherited)
        self.supervisors = [slot.process for slot in self._slots]

    def restart(self) -> None:
        """All is killed, as in a power cut, and started again over the same journal."""
        self.kill_all()
        self.loop.create_task(self.start(), context=NOBODY.copy())

    # ---- processes ----------------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        return [*(r.process for r in self.routers if r.incarnation), *self.ranks(), *self.stores.processes]

    def ranks(self) -> list[Process]:
        """Also those of the generation before."""
        return [rank for worker in (*self._before, *self.workers) for rank in worker.ranks]

    def kill_all(self) -> None:
        for process in [*self.supervisors, *self.processes()]:
            self.kill(process)

    # ---- laws that hold at any time -----------------------------------------------------------------

    def check_released(self, session_id: str) -> None:
        """Law L9: a release that freed pages freed them on every rank of its worker."""
        pin = self.disk.db.execute("SELECT worker FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        for worker in self.workers:
            if worker.leader is None or (f"{worker.name}@{worker.incarnation}",) != pin:
                continue
            for follower in worker.followers:
                if session_id in follower.follower.rank.cache.slots:
                    self.violated(f"L9: {session_id} was released, a rank of {worker.name} still holds it")


class _Time:
    """The ``time`` module of simulated processes, each with its own idea of the hour."""

    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()

    @staticmethod
    def time() -> float:
        process = PROCESS.get()
        return asyncio.get_running_loop().time() + (process.clock_skew_s if process else 0.0)


@contextlib.contextmanager
def simulated_edges(network: Callable[[], Network], rng: random.Random) -> Iterator[None]:
    """Put the simulated edges in place of the real ones."""

    numbers = itertools.count(1)
    no_metrics = SimpleNamespace(url="", stop=lambda: None)
    patches = [
        mock.patch("grpc.aio.insecure_channel", lambda address, **options: network().channel(address)),
        mock.patch("grpc.aio.server", lambda **options: network().server()),
        mock.patch.object(reflection, "enable_server_reflection", lambda names, server: None),
        mock.patch.object(workers.serving.worker_server, "MetricsServer", lambda *args: no_metrics),
        mock.patch.object(workers.serving.worker_server, "Leader", SimulatedLeader),
        mock.patch.object(workers.serving.worker_server, "RankLinks", SimulatedLinks),
        mock.patch.object(workers.serving.rank_server, "Follower", SimulatedFollower),
        mock.patch.object(workers.engine.leader, "Rank", SimulatedRank),
        mock.patch.object(workers.engine.follower, "Rank", SimulatedRank),
        mock.patch.object(router.turns.dispatch, "time", _Time),
        mock.patch.object(router.turns.relay, "time", _Time),
        mock.patch.object(router.turns.sessions, "time", _Time),
        mock.patch.object(router.fleet.migration, "time", _Time),
        mock.patch.object(workers.engine.leader, "time", _Time),
        mock.patch.object(workers.engine.drafts, "time", _Time),
        mock.patch.object(workers.engine.pace, "time", _Time),
        mock.patch.object(workers.engine.epochs, "time", _Time),
        mock.patch.object(workers.serving.importer, "time", _Time),
        mock.patch.object(workers.serving.bandwidth, "time", _Time),
        mock.patch.object(workers.serving.turn_loads, "MIN_LOAD_TOKENS", MIN_LOAD_TOKENS),
        mock.patch.object(workers.engine.admission, "MIN_LOAD_TOKENS", MIN_LOAD_TOKENS),
        mock.patch.object(workers.serving.page_copies, "StoreClient", SimulatedClient),
        mock.patch.object(workers.serving.page_copies, "ThreadPoolExecutor", lambda *given, **more: InThisThread()),
        mock.patch.object(workers.store.client, "socket_of", store_address),
        mock.patch.object(workers.store.disk, "Segments", FailingSegments),
        mock.patch.object(workers.store.disk, "time", _Time),
        mock.patch.object(router.journal.sqlite_store, "time", _Time),
        mock.patch.object(router.journal.supervision, "time", _Time),
        mock.patch.object(cluster.leadership, "time", _Time),
        mock.patch.object(router.turns.prepare, "random", rng),
        mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(int=next(numbers))),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
