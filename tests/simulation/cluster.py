"""A cluster of simulated processes that run Holdfast's own code: routers, leaders, followers.

Replaced are only the edges: gRPC (``network``), threads, the clock, randomness, the disk under SQLite,
the model (``model``), and Ray (``places``).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sqlite3
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from grpc_reflection.v1alpha import reflection

import router.dispatch
import router.gateway
import router.moves
import router.sessions
import router.sqlite_journal
import workers.follower
import workers.handover_rpc
import workers.leader
import workers.rank_server
import workers.server
from cluster.supervisor import Supervisor
from holdfast.errors import JournalUnavailable
from router.config import RouterConfig
from router.sqlite_file import SCHEMA
from router.sqlite_journal import SqliteJournal, _answer
from tests.simulation.loop import PROCESS, Process, SimulatedLoop
from tests.simulation.model import SimulatedRank
from tests.simulation.network import NOBODY, Network
from tests.simulation.places import POLL_S, ROUTER_PORTS, Router, Worker
from workers.config import EngineConfig
from workers.follower import Follower
from workers.leader import IDLE_WAIT_S, Leader
from workers.rank_links import RankLinks

ENGINE = EngineConfig(
    page_size=4,
    context_length=120,
    max_total_tokens=240,
    chunked_prefill_size=24,
    max_running_requests=4,
    max_queued_requests=6,
    max_sessions=12,
)
ROUTER = RouterConfig(
    model=Path(),
    served_model_name="simulated",
    max_live_turns=16,
    max_queued_turns_per_session=4,
    worker_wait_s=8.0,
    token_timeout_s=15.0,
    control_timeout_s=4.0,
)
STEPS_S = ((0.005, 0.02), (0.1, 0.4))


@dataclass
class Disk:
    """What the journals' one database lies on."""

    rng: random.Random
    db: sqlite3.Connection = field(default_factory=lambda: sqlite3.connect(":memory:", isolation_level=None))
    latency_s: tuple[float, float] = (0.0002, 0.002)
    fails: float = 0.0
    """How likely a statement is to fail."""
    loses_answers: float = 0.0
    """How likely it is that a commit is done and nobody hears of it."""

    @property
    def in_transaction(self) -> bool:
        return self.db.in_transaction

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        if self.fails and statement != "ROLLBACK" and self.rng.random() < self.fails:
            raise sqlite3.OperationalError("disk I/O error")
        return self.db.execute(statement, values)


class SimulatedJournal(SqliteJournal):
    """The real statements, on a simulated disk, without a thread. ``wrote`` is told of each fenced write."""

    def __init__(self, disk: Disk, name: str, wrote: Callable[[str, str, int], None]) -> None:
        self.router, self._disk, self._db = name, disk, disk  # type: ignore[assignment]
        self._wrote = wrote
        self._lease_s = router.sqlite_journal.ROUTER_LEASE_S
        self._retention_s = router.sqlite_journal.TOMBSTONE_RETENTION_S
        self._max_sessions = router.sqlite_journal.MAX_SESSIONS_PER_TENANT
        self._beats = None
        self._answers: list[tuple[asyncio.Future[Any], Any]] = []
        loop = asyncio.get_running_loop()
        take = lambda answer, answers: self._answers.extend(answers)  # noqa: E731
        self._loop = SimpleNamespace(create_future=loop.create_future, call_soon_threadsafe=take)  # type: ignore[assignment]
        self.num_commits = self.num_writes = 0
        self._waiting: list[Any] = []
        self._writer: asyncio.Task[None] | None = None

    def _call(self, function: Any, *args: Any) -> Any:
        future = self._loop.create_future()
        self._waiting.append((function, args, future))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())
        return future

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            await asyncio.sleep(self._disk.rng.uniform(*self._disk.latency_s))
            self._commit(group)
            await asyncio.sleep(self._disk.rng.uniform(*self._disk.latency_s))
            answers, self._answers = self._answers, []
            if self._disk.rng.random() < self._disk.loses_answers:
                lost = JournalUnavailable("the answer was lost")
                answers = [(future, lost) for future, _ in answers]
            _answer(answers)
        self._writer = None

    def _of_turn(self, session_id: str, epoch: int, turn_id: str) -> Any:
        row = super()._of_turn(session_id, epoch, turn_id)
        self._wrote(self.router, session_id, epoch)
        return row

    async def close(self) -> None:
        raise AssertionError("simulated routers are killed")


class SimulatedLeader(Leader):
    """The leader's loop as a task: one step, then the time that it took."""

    step_s = STEPS_S[0]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._commands = _Commands()  # type: ignore[assignment]

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        commands: Any = self._commands
        try:
            while True:
                if not self.scheduler.turns:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(commands.some.wait(), IDLE_WAIT_S)
                while commands.waiting:
                    commands.waiting.popleft()()
                commands.some.clear()
                self.step()
                await asyncio.sleep(random.uniform(*self.step_s))
        except Exception as error:
            self._on_crash(error)


class _Commands:
    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
        self.some = asyncio.Event()

    def put(self, command: Callable[[], None]) -> None:
        self.waiting.append(command)
        self.some.set()


class SimulatedLinks(RankLinks):
    """Without the thread that hands entries over."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._thread = SimpleNamespace(start=lambda: None)  # type: ignore[assignment]

    def send(self, entry: Any) -> None:
        self._take(workers.rank_links.rank_pb2.LeaderMessage(entry=entry))


class SimulatedFollower(Follower):
    """The follower's loop as a task."""

    play_s = (0.0001, 0.01)

    def start(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._drive())

    def push(self, item: Any) -> None:
        self._queue.put_nowait(item)

    async def _drive(self) -> None:
        try:
            while True:
                item = await self._queue.get()
                await asyncio.sleep(random.uniform(*self.play_s))
                self.take(item)
        except Exception as error:
            self._on_crash(error)


class Cluster:
    """Routers, workers, their journal, and the supervisor of all."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random, tp: int, trace: Callable[[str], None]) -> None:
        self.loop, self.rng, self.trace = loop, rng, trace
        self.network = Network(rng)
        self.disk = Disk(rng)
        self.disk.db.executescript(SCHEMA)
        self.engine_config, self.router_config = ENGINE, ROUTER
        self.routers = [Router(self, i) for i in range(len(ROUTER_PORTS))]
        self.workers = [Worker(self, i, tp) for i in range(2)]
        self.supervisor: Process
        self.owners: dict[tuple[str, int], str] = {}
        self.violations: list[str] = []
        self.sessions_moved = 0
        self.disturbed = False
        """Whether a fault has struck, or clocks differ, by which leases lapse early."""

    def waits_for_a_lost_worker(self, turn_id: str) -> bool:
        """Whether a router holds a turn at a worker that it has lost."""
        gateways = [router.gateway for router in self.routers if router.gateway is not None]
        turns = [gateway.turns[turn_id] for gateway in gateways if turn_id in gateway.turns]
        return any(turn.link is not None and not turn.link.alive for turn in turns)

    def violated(self, what: str) -> None:
        self.trace(f"VIOLATION {what}")
        self.violations.append(what)

    async def start(self) -> None:
        """Start everything, as often as it takes."""
        while True:
            self.supervisor = process = Process("supervisor", "supervisor")
            supervisor = Supervisor(self.workers, self.routers, start_timeout_s=20.0, rebalance_per_s=2.0)
            started = process.spawn(supervisor.start())
            while process.alive and not started.done():
                await asyncio.sleep(POLL_S)
            if not process.alive or not started.exception():
                return
            self.trace(f"the cluster does not start: {started.exception()}")
            self.kill_all()

    def restart(self) -> None:
        """All is killed, as in a power cut, and started again over the same journal."""
        self.kill_all()
        self.loop.create_task(self.start(), context=NOBODY.copy())

    # ---- processes ----------------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        return [r.process for r in self.routers if r.incarnation] + [rank for w in self.workers for rank in w.ranks]

    def kill(self, process: Process) -> None:
        if process.alive:
            self.trace(f"{process.name} is killed")
            self.network.kill(process)

    def kill_all(self) -> None:
        for process in [self.supervisor, *self.processes()]:
            self.kill(process)

    # ---- what the supervisor sees -------------------------------------------------------------------

    def reaches(self, process: Process) -> bool:
        """Whether the supervisor and a process's host hear each other."""
        hosts = (self.supervisor.host, process.host)
        return self.network.is_whole(*hosts) and self.network.is_whole(*reversed(hosts))

    def journal(self, router: str) -> SimulatedJournal:
        return SimulatedJournal(self.disk, router, self._wrote)

    # ---- laws at any time ---------------------------------------------------------------------------

    def check_released(self, session_id: str) -> None:
        """Law L9: a release that freed pages freed them on every rank of its worker."""
        pin = self.disk.db.execute("SELECT worker FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        for worker in self.workers:
            if worker.leader is None or (f"{worker.name}@{worker.incarnation}",) != pin:
                continue
            for follower in worker.followers:
                if session_id in follower.follower.rank.cache.slots:
                    self.violated(f"L9: {session_id} was released, a rank of {worker.name} still holds it")

    def _wrote(self, router_name: str, session_id: str, epoch: int) -> None:
        """Law L11: under one epoch, one router writes."""
        owner = self.owners.setdefault((session_id, epoch), router_name)
        if owner != router_name:
            self.violated(f"L11: {router_name} and {owner} both wrote to {session_id} under epoch {epoch}")


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
    no_metrics = (SimpleNamespace(server_port=0), None)
    patches = [
        mock.patch("grpc.aio.insecure_channel", lambda address, **options: network().channel(address)),
        mock.patch("grpc.aio.server", lambda **options: network().server()),
        mock.patch.object(reflection, "enable_server_reflection", lambda names, server: None),
        mock.patch.object(workers.server, "start_http_server", lambda *args: no_metrics),
        mock.patch.object(workers.server, "Leader", SimulatedLeader),
        mock.patch.object(workers.server, "RankLinks", SimulatedLinks),
        mock.patch.object(workers.rank_server, "Follower", SimulatedFollower),
        mock.patch.object(workers.leader, "Rank", SimulatedRank),
        mock.patch.object(workers.follower, "Rank", SimulatedRank),
        mock.patch.object(router.dispatch, "time", _Time),
        mock.patch.object(router.gateway, "time", _Time),
        mock.patch.object(router.sessions, "time", _Time),
        mock.patch.object(router.moves, "time", _Time),
        mock.patch.object(workers.leader, "time", _Time),
        mock.patch.object(workers.handover_rpc, "time", _Time),
        mock.patch.object(router.sqlite_journal, "time", _Time),
        mock.patch.object(router.gateway, "random", rng),
        mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(int=next(numbers))),
    ]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
