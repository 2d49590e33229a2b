"""A cluster of simulated processes that run Holdfast's own code: routers, leaders, followers.

Replaced are only the edges: gRPC (``network``), threads, the clock, randomness, the disk under SQLite,
the model (``model``), and Ray, whose part a simulated supervisor plays.
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
from holdfast.errors import JournalUnavailable
from holdfast.v1 import session_pb2_grpc
from router.config import RouterConfig
from router.gateway import Gateway
from router.grpc_api import SessionServer
from router.metrics import Metrics
from router.sqlite_file import SCHEMA
from router.sqlite_journal import SqliteJournal, _answer
from router.workers import WorkerAddress
from tests.simulation.loop import PROCESS, Process, SimulatedLoop
from tests.simulation.model import SimulatedRank
from tests.simulation.network import Network
from workers.collectives import Shard
from workers.config import EngineConfig
from workers.follower import Follower
from workers.leader import IDLE_WAIT_S, Leader
from workers.rank_links import RankLinks
from workers.rank_server import RankServer
from workers.server import WorkerServer

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
SUPERVISOR_POLL_S = 0.05
STEPS_S = ((0.005, 0.02), (0.1, 0.4))
ROUTER_PORTS = (1001, 1002)


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


class _Codec:
    """Tokens are their own text."""

    def stream(self, stops: Any) -> Any:
        return SimpleNamespace(push=lambda tokens: "", finish=lambda matched: "")

    def decode(self, tokens: Any) -> str:
        return ""


class Router:
    """One router's place: its port, and the process that fills it now."""

    def __init__(self, index: int) -> None:
        self.index, self.host = index, f"router{index}"
        self.address = f"{self.host}:{ROUTER_PORTS[index]}"
        self.incarnation = 0
        self.process: Process
        self.gateway: Gateway | None = None


class Worker:
    """One worker's place, and the processes of its ranks."""

    def __init__(self, index: int, size: int) -> None:
        self.worker_id, self.host, self.size = f"w{index}", f"worker{index}", size
        self.incarnation = 0
        self.ranks: list[Process] = []
        self.leader: WorkerServer | None = None
        self.followers: list[RankServer] = []
        self.address: WorkerAddress | None = None


class Cluster:
    """Routers, workers, their journal, and the supervisor that starts what died."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random, tp: int, trace: Callable[[str], None]) -> None:
        self.loop, self.rng, self.trace = loop, rng, trace
        self.network = Network(rng)
        self.disk = Disk(rng)
        self.disk.db.executescript(SCHEMA)
        self.routers = [Router(i) for i in range(len(ROUTER_PORTS))]
        self.workers = [Worker(i, tp) for i in range(2)]
        self.supervisor = Process("supervisor", "supervisor")
        self.owners: dict[tuple[str, int], str] = {}
        self.violations: list[str] = []
        self.sessions_moved = 0

    def violated(self, what: str) -> None:
        self.trace(f"VIOLATION {what}")
        self.violations.append(what)

    async def start(self) -> None:
        await asyncio.gather(*(self.start_router(place) for place in self.routers))
        await asyncio.gather(*(self.start_worker(worker) for worker in self.workers))
        self._announce()
        for place in self.routers:
            self.supervisor.spawn(self._keep_router(place))
        for worker in self.workers:
            self.supervisor.spawn(self._keep_worker(worker))

    # ---- processes ----------------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        return [r.process for r in self.routers] + [rank for w in self.workers for rank in w.ranks]

    def kill(self, process: Process) -> None:
        if process.alive:
            self.trace(f"{process.name} is killed")
            self.network.kill(process)

    async def start_router(self, place: Router) -> None:
        place.incarnation += 1
        place.gateway = None
        skew_s = self.rng.uniform(-2.0, 2.0) if self.rng.random() < 0.3 else 0.0
        place.process = Process(f"router{place.index}#{place.incarnation}", place.host, skew_s)

        async def serve() -> None:
            journal = SimulatedJournal(self.disk, place.process.name, self._wrote)
            await journal.start()
            gateway = Gateway(ROUTER, journal, _Codec(), Metrics())  # type: ignore[arg-type]
            server = self.network.server()
            session_pb2_grpc.add_SessionServiceServicer_to_server(SessionServer(gateway), server)
            await gateway.set_workers(self.addresses())
            server.add_insecure_port(place.address)
            place.gateway = gateway

        serving = place.process.spawn(serve())
        await self._until(lambda: serving.done() or not place.process.alive)
        if place.gateway is None:
            self.kill(place.process)  # it could not start: the supervisor tries again

    async def start_worker(self, place: Worker) -> None:
        place.incarnation += 1
        place.address, place.leader, place.followers = None, None, []
        name = f"{place.worker_id}@{place.incarnation}"
        # Each rank has its own host: a worker may span machines.
        place.ranks = [Process(f"{name}/{rank}", f"{place.host}.{rank}") for rank in range(place.size)]
        followers: dict[int, str] = {}
        identity = (place.worker_id, place.incarnation, ENGINE)

        async def follow(rank: int, group: Any, on_lost: Callable[[str], None]) -> None:
            server = RankServer(*identity, group, "", on_lost)
            followers[rank] = await server.start(place.ranks[rank].host)
            place.followers.append(server)

        async def lead(group: Any, on_lost: Callable[[str], None]) -> None:
            server = WorkerServer(*identity, on_lost, group=group)
            address = await server.start(place.ranks[0].host, lambda: followers)
            place.leader = server
            place.address = WorkerAddress(place.worker_id, place.incarnation, address, ENGINE.max_running_requests)

        for rank in reversed(range(place.size)):
            process = place.ranks[rank]

            def on_lost(reason: str, process: Process = process) -> None:
                self.trace(f"{process.name} ends: {reason}")
                self.kill(process)

            group: Any = SimpleNamespace(shard=Shard(rank, place.size))
            process.spawn(lead(group, on_lost) if rank == 0 else follow(rank, group, on_lost))
            await self._until(lambda: place.address is not None or len(followers) == place.size - rank)  # noqa: B023
            if not all(rank.alive for rank in place.ranks):
                return

    async def _until(self, condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
        end = self.loop.time() + deadline_s
        while not condition() and self.loop.time() < end:
            await asyncio.sleep(0.01)

    # ---- the supervisor -----------------------------------------------------------------------------

    def addresses(self) -> list[WorkerAddress]:
        return [worker.address for worker in self.workers if worker.address is not None]

    async def _keep_router(self, place: Router) -> None:
        while True:
            while place.process.alive:
                await asyncio.sleep(SUPERVISOR_POLL_S)
            await asyncio.sleep(self.rng.uniform(0.1, 2.0))
            await self.start_router(place)
            self.trace(f"{place.process.name} serves")

    async def _keep_worker(self, place: Worker) -> None:
        while True:
            silent_since = None
            while all(rank.alive for rank in place.ranks):
                paused = any(rank.paused for rank in place.ranks)
                silent_since = (silent_since or self.loop.time()) if paused else None
                if silent_since is not None and self.loop.time() - silent_since > 2.0:
                    break
                await asyncio.sleep(SUPERVISOR_POLL_S)
            place.address = None
            await asyncio.sleep(self.rng.uniform(0.0, 1.0))
            self._announce()
            for rank in place.ranks:
                self.kill(rank)
            await asyncio.sleep(self.rng.uniform(0.3, 2.0))
            await self.start_worker(place)
            self.trace(f"{place.worker_id}@{place.incarnation} {'serves' if place.address else 'did not start'}")
            self._announce()

    def _announce(self) -> None:
        for place in self.routers:
            if place.gateway is not None and place.process.alive:
                place.process.spawn(place.gateway.set_workers(self.addresses()))

    def check_released(self, session_id: str) -> None:
        """Law L9: a release that freed pages freed them on every rank of its worker."""
        pin = self.disk.db.execute("SELECT worker FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        for worker in self.workers:
            if worker.leader is None or (f"{worker.worker_id}@{worker.incarnation}",) != pin:
                continue
            for follower in worker.followers:
                if session_id in follower.follower.rank.cache.slots:
                    self.violated(f"L9: {session_id} was released, a rank of {worker.worker_id} still holds it")

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
