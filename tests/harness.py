"""A cluster in this process, without Ray: real engines, real gRPC, real HTTP, on free ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch.distributed as dist

from router.app import RouterServer
from router.config import RouterConfig
from router.fleet.fleet import Fleet
from router.fleet.link import WorkerAddress
from tests.waiting import until
from workers.config import BUNDLED_MODEL, EngineConfig
from workers.models.parallel import Shard
from workers.serving.group import RankIdentity, start_rank
from workers.serving.rank_server import RankServer
from workers.serving.worker_server import WorkerServer

HOST = "127.0.0.1"
ENGINE = EngineConfig(max_total_tokens=16_384, max_running_requests=8, overlap_schedule=True)


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

    async def start_worker(
        self,
        worker_id: str,
        incarnation: int,
        engine: EngineConfig,
        tp: int = 1,
        *,
        node: str = "here",
        lifeline: str = "",
    ) -> None:
        identity = (worker_id, incarnation, engine, tp)
        server, followers, address = await start_group(*identity, node=node, lifeline=lifeline)
        self.workers[worker_id], self.followers[worker_id] = server, followers
        self.addresses[worker_id] = WorkerAddress(worker_id, incarnation, address, engine.max_running_requests)
        await self.announce()

    async def announce(self) -> None:
        for router in self.routers:
            await router.set_workers(list(self.addresses.values()))
            fleet = router.core.fleet
            await until(partial(self._reaches_all, fleet), 20, "workers to be reached")

    def _reaches_all(self, fleet: Fleet) -> bool:
        return len(fleet.alive()) == len(self.addresses)

    async def lose_worker(self, worker_id: str) -> None:
        """Stop a worker under its streams, as its death would look from the router."""
        del self.addresses[worker_id]
        leader = self.workers.pop(worker_id)
        assert leader._server is not None
        await leader._server.stop(None)  # with no time to end its turns
        await stop_group(leader, self.followers.pop(worker_id))

    def lose_router(self) -> RouterServer:
        """Cut off the first router, as the others see its kill -9: it falls silent and leaves its turns open."""
        dead = self.routers.pop(0)
        self.lost_routers.append(dead)

        async def leave_open(turn: object, settle: object) -> None:
            pass

        dead.core.gateway._end = leave_open  # type: ignore[method-assign]  # of this instance alone
        journal: Any = dead._journal
        journal._beats.cancel()
        for link in dead.core.fleet._links.values():
            link._task.cancel()
        return dead

    def pinned_to(self, session_id: str) -> str:
        session = self.router.core.sessions._sessions[session_id]
        return session.record.worker.split("@")[0]

    async def assert_no_leak(self) -> None:
        """Every live worker's audit is clean, and nothing runs."""
        for router in self.routers:
            await until(partial(_has_no_turns, router), 10, "turns to end")
        for server in self.workers.values():
            await until(partial(_is_idle, server), 10, "the engine to be idle")
            report = await asyncio.wait_for(asyncio.wrap_future(server._leader.audit()), 10)
            assert report.ok and all(rank.num_running == 0 for rank in report.ranks), report

    def channel(self, router: int = 0) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.grpc_targets[router])


def _has_no_turns(router: RouterServer) -> bool:
    return not router.core.live


def _is_idle(server: WorkerServer) -> bool:
    return not server._leader.scheduler.turns


async def start_group(
    worker_id: str,
    incarnation: int,
    engine: EngineConfig,
    tp: int = 1,
    on_lost: Callable[[str], None] = print,
    *,
    node: str = "here",
    lifeline: str = "",
) -> tuple[WorkerServer, list[RankServer], str]:
    """A worker of ``tp`` ranks: the leader, its followers, its address."""
    store = dist.HashStore() if tp > 1 else None
    ranks = [RankIdentity(worker_id, incarnation, Shard(rank, tp), HOST, node, lifeline) for rank in range(tp)]
    started = await asyncio.gather(*(start_rank(rank, engine, store, on_lost) for rank in ranks))
    leader, address = started[0]
    followers = [server for server, _ in started[1:] if isinstance(server, RankServer)]
    assert isinstance(leader, WorkerServer) and len(followers) == tp - 1
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
    **router_settings: Any,
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
            await harness.start_router(replace(config, **router_settings))
        for i in range(num_workers):
            await harness.start_worker(f"w{i}", 1, engine, tp)
        yield harness
    finally:
        # Side by side: each stop waits a while for its threads, and costs nothing meanwhile.
        await asyncio.gather(*(router.stop() for router in [*harness.routers, *harness.lost_routers]))
        await asyncio.gather(*(stop_group(server, harness.followers[w]) for w, server in harness.workers.items()))


def model_copy(folder: Path) -> Path:
    """The bundled model's folder, with files that a test may change."""
    folder.mkdir()
    for path in BUNDLED_MODEL.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder
