"""A whole cluster in this process, without Ray: real engines, real gRPC, real HTTP, on free ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import torch.distributed as dist

from router.app import RouterServer
from router.config import RouterConfig
from router.workers import WorkerAddress
from tests.waiting import until
from workers.collectives import Shard
from workers.config import BUNDLED_MODEL, EngineConfig
from workers.group import Seat, start_rank
from workers.rank_server import RankServer
from workers.server import WorkerServer

HOST = "127.0.0.1"
ENGINE = EngineConfig(max_total_tokens=16_384, max_running_requests=8)


@dataclass
class Harness:
    """Workers and routers over one journal, and where to reach them."""

    routers: list[RouterServer]
    workers: dict[str, WorkerServer]
    followers: dict[str, list[RankServer]]
    addresses: dict[str, WorkerAddress]
    urls: list[str]
    grpc_targets: list[str]
    lost_routers: list[RouterServer] = field(default_factory=list)

    @property
    def router(self) -> RouterServer:
        return self.routers[0]

    @property
    def url(self) -> str:
        return self.urls[0]

    async def start_router(self, config: RouterConfig) -> None:
        router = RouterServer(config)
        port, grpc_port = await router.start()
        self.routers.append(router)
        self.urls.append(f"http://{HOST}:{port}")
        self.grpc_targets.append(f"{HOST}:{grpc_port}")

    async def start_worker(self, worker_id: str, incarnation: int, engine: EngineConfig, tp: int = 1) -> None:
        server, followers, address = await start_group(worker_id, incarnation, engine, tp)
        self.workers[worker_id], self.followers[worker_id] = server, followers
        self.addresses[worker_id] = WorkerAddress(worker_id, incarnation, address, engine.max_running_requests)
        await self.announce()

    async def announce(self) -> None:
        for router in self.routers:
            await router.set_workers(list(self.addresses.values()))
            alive = router.gateway.alive_links
            await until(lambda alive=alive: len(alive()) == len(self.addresses), 20, "workers to be reached")

    async def lose_worker(self, worker_id: str) -> None:
        """Stop a worker under its streams, as its death would look from the router."""
        del self.addresses[worker_id]
        leader = self.workers.pop(worker_id)
        await leader._server.stop(None)  # with no time to end its turns
        await stop_group(leader, self.followers.pop(worker_id))

    def lose_router(self) -> RouterServer:
        """The first router, as a kill -9 of it looks to the others: no word any more, turns left open."""
        dead = self.routers.pop(0)
        self.lost_routers.append(dead)

        async def leave_open(turn: object, *, completed: bool) -> None:
            pass

        dead.gateway._end = leave_open  # type: ignore[method-assign]
        dead._journal._beats.cancel()  # type: ignore[attr-defined]
        for link in dead.gateway._links.values():
            link._task.cancel()
        return dead

    def pinned_to(self, session_id: str) -> str:
        session = self.router.gateway.sessions._sessions[session_id]
        return session.record.worker.split("@")[0]

    async def assert_no_leak(self) -> None:
        """Every live worker's audit is clean, and nothing runs."""
        for router in self.routers:
            await until(lambda r=router: not r.gateway.live_turns(), 10, "turns to end")
        for server in self.workers.values():
            await until(lambda s=server: not s._leader.scheduler.turns, 10, "the engine to be idle")
            report = await asyncio.wait_for(asyncio.wrap_future(server._leader.audit()), 10)
            assert report.ok and all(rank.num_running == 0 for rank in report.ranks), report

    def channel(self, router: int = 0) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.grpc_targets[router])


async def start_group(
    worker_id: str, incarnation: int, engine: EngineConfig, tp: int = 1, on_lost: Callable[[str], None] = print
) -> tuple[WorkerServer, list[RankServer], str]:
    """A worker of ``tp`` ranks: the leader, its followers, its address."""
    store = dist.HashStore() if tp > 1 else None
    seats = [Seat(worker_id, incarnation, Shard(rank, tp), HOST, "here") for rank in range(tp)]
    started = await asyncio.gather(*(start_rank(seat, engine, store, on_lost) for seat in seats))
    (leader, address), followers = started[0], [server for server, _ in started[1:]]
    assert isinstance(leader, WorkerServer) and all(isinstance(server, RankServer) for server in followers)
    return leader, followers, address


async def stop_group(leader: WorkerServer, followers: list[RankServer]) -> None:
    for follower in followers:
        follower.expect_end()
    await leader.stop()
    for follower in followers:
        await follower.stop()


@asynccontextmanager
async def running(
    tmp_path: Path,
    *,
    num_workers: int = 2,
    num_routers: int = 1,
    tp: int = 1,
    engine: EngineConfig = ENGINE,
    **router_settings: object,
) -> AsyncIterator[Harness]:
    config = RouterConfig(
        model=engine.model,
        served_model_name="holdfast-tiny",
        host=HOST,
        port=0,
        grpc_port=0,
        journal_path=tmp_path / "journal.db",
    )
    harness = Harness([], {}, {}, {}, [], [])
    try:
        for _ in range(num_routers):
            await harness.start_router(replace(config, **router_settings))  # type: ignore[arg-type]
        for i in range(num_workers):
            await harness.start_worker(f"w{i}", 1, engine, tp)
        yield harness
    finally:
        for router in [*harness.routers, *harness.lost_routers]:
            await router.stop()
        for worker_id, server in harness.workers.items():
            await stop_group(server, harness.followers[worker_id])


def model_copy(folder: Path) -> Path:
    """The bundled model's folder, with files that a test may change."""
    folder.mkdir()
    for path in BUNDLED_MODEL.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder
