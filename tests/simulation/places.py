"""The supervisor's places, filled with simulated processes: what Ray, raylets and kill -9 do is played here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.errors import HoldfastError
from holdfast.silence import silent_for
from holdfast.v1 import session_pb2_grpc
from router.gateway import Gateway
from router.grpc_api import SessionServer
from router.journal import ROUTER_LEASE_S
from router.metrics import Metrics
from router.workers import WorkerAddress
from tests.simulation.loop import Process
from tests.simulation.network import NOBODY
from workers.collectives import Shard
from workers.rank_server import RankServer
from workers.server import WorkerServer

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

T = TypeVar("T")
POLL_S = 0.05
START_POLL_S = 0.01
NOTICED_S = (0.0, 1.0)
"""From a process's death until Ray tells of it."""
STARTS_S = (0.3, 2.0)
CUT_OFF_S = (3.0, 10.0)
"""Until a node that is cut off ends what runs on it."""
ROUTER_PORTS = (1001, 1002)


async def died_or_silent(cluster: Cluster, processes: list[Process], probed: Process, silence_s: float) -> str:
    """Returns when Ray tells that one of them died, or the probed one has not answered for so long."""

    def heard() -> float | None:
        return cluster.loop.time() if cluster.reaches(probed) and not probed.paused else None

    silence = asyncio.create_task(silent_for(silence_s, heard))
    try:
        while all(process.alive for process in processes):
            if silence.done():
                return f"{probed.name} does not answer"
            await asyncio.sleep(POLL_S)
    finally:
        silence.cancel()
    await asyncio.sleep(cluster.rng.uniform(*NOTICED_S))
    return "it died"


class _Codec:
    """Tokens are their own text."""

    def stream(self, stops: Any, min_tokens: int) -> Any:
        return SimpleNamespace(push=lambda tokens: "", finish=lambda matched: "")

    def decode(self, tokens: Any) -> str:
        return ""


class Router:
    """One router's place: its port, and the process that fills it now."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        self.cluster, self.index = cluster, index
        self.name, self.host = f"router{index}", f"router{index}"
        self.address = f"{self.host}:{ROUTER_PORTS[index]}"
        self.incarnation = 0
        self.process: Process
        self.gateway: Gateway | None = None
        self.serves = False

    async def start(self, workers: list[WorkerAddress]) -> None:
        self.incarnation += 1
        self.gateway, self.serves = None, False
        cluster, rng = self.cluster, self.cluster.rng
        skew_s = rng.uniform(-2.0, 2.0) if rng.random() < 0.3 else 0.0
        cluster.disturbed |= skew_s != 0.0
        self.process = process = Process(f"router{self.index}#{self.incarnation}", self.host, skew_s)

        async def serve() -> Gateway:
            journal = cluster.journal(process.name)
            await journal.start()
            gateway = Gateway(cluster.router_config, journal, _Codec(), Metrics())  # type: ignore[arg-type]
            server = cluster.network.server()
            session_pb2_grpc.add_SessionServiceServicer_to_server(SessionServer(gateway), server)
            await gateway.set_workers(workers)
            server.add_insecure_port(self.address)
            return gateway

        self.gateway = await self._ask(serve())
        self.serves = True
        cluster.trace(f"{process.name} serves")

    async def _ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Have the router do something; its death is an error."""
        process = self.process
        asked = process.spawn(coroutine)
        while process.alive and not asked.done():
            await asyncio.sleep(START_POLL_S)
        if not asked.done():
            raise HoldfastError(f"{process.name} died")
        return asked.result()

    def _serving(self) -> Gateway:
        if self.gateway is None or not self.process.alive:
            raise HoldfastError(f"{self.name} does not serve")
        return self.gateway

    async def set_workers(self, workers: list[WorkerAddress]) -> None:
        await self._ask(self._serving().set_workers(workers))

    async def ready_workers(self) -> list[str]:
        return [link.name for link in self._serving().alive_links()]

    async def rebalance(self, max_moves: int) -> int:
        moved = await self._ask(self._serving().moves.rebalance(max_moves))
        self.cluster.sessions_moved += moved
        return moved

    async def broken(self) -> str:
        return await died_or_silent(self.cluster, [self.process], self.process, 2 * ROUTER_LEASE_S)

    async def end(self) -> None:
        self.serves = False
        self.cluster.kill(self.process)


class Worker:
    """One worker's place, and the processes of its ranks."""

    def __init__(self, cluster: Cluster, index: int, size: int) -> None:
        self.cluster = cluster
        self.name, self.host, self.size = f"w{index}", f"worker{index}", size
        self.incarnation = 0
        self.ranks: list[Process] = []
        self.leader: WorkerServer | None = None
        self.followers: list[RankServer] = []
        self.address: WorkerAddress | None = None

    async def start(self) -> None:
        cluster, engine = self.cluster, self.cluster.engine_config
        await asyncio.sleep(cluster.rng.uniform(*STARTS_S))
        self.incarnation += 1
        self.address, self.leader, self.followers = None, None, []
        name = f"{self.name}@{self.incarnation}"
        # Each rank has its own host: a worker may span machines.
        self.ranks = [Process(f"{name}/{rank}", f"{self.host}.{rank}") for rank in range(self.size)]
        if not all(cluster.reaches(rank) for rank in self.ranks):
            self.ranks = []
            raise HoldfastError(f"a node of {self.name} is not there")
        followers: dict[int, str] = {}
        identity = (self.name, self.incarnation, engine)

        async def follow(rank: int, group: Any, on_lost: Callable[[str], None]) -> None:
            server = RankServer(*identity, group, "", on_lost)
            followers[rank] = await server.start(self.ranks[rank].host)
            self.followers.append(server)

        async def lead(rank: int, group: Any, on_lost: Callable[[str], None]) -> None:
            server = WorkerServer(*identity, on_lost, group=group)
            address = await server.start(self.ranks[rank].host, lambda: followers)
            self.leader = server
            self.address = WorkerAddress(self.name, self.incarnation, address, engine.max_running_requests)

        for rank, process in reversed(list(enumerate(self.ranks))):

            def on_lost(reason: str, process: Process = process) -> None:
                cluster.trace(f"{process.name} ends: {reason}")
                cluster.kill(process)

            group: Any = SimpleNamespace(shard=Shard(rank, self.size))
            started = process.spawn((follow if rank else lead)(rank, group, on_lost))
            while not started.done() and all(rank.alive for rank in self.ranks):
                await asyncio.sleep(START_POLL_S)
            if not started.done() or not all(rank.alive for rank in self.ranks):
                self.address = None
                raise HoldfastError(f"a rank of {name} died")
            started.result()
        cluster.trace(f"{name} serves")

    async def broken(self) -> str:
        return await died_or_silent(self.cluster, self.ranks, self.ranks[0], self.cluster.engine_config.rank_lease_s)

    async def end(self) -> None:
        self.address = None
        for rank in self.ranks:
            if self.cluster.reaches(rank):
                self.cluster.kill(rank)
            else:
                after_s = self.cluster.rng.uniform(*CUT_OFF_S)
                self.cluster.loop.call_later(after_s, self.cluster.kill, rank, context=NOBODY.copy())
