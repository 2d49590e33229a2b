"""A whole cluster in this process, without Ray: real engines, real gRPC, real HTTP, on free ports."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc

from router.app import RouterServer
from router.config import RouterConfig
from router.workers import WorkerAddress
from tests.waiting import until
from workers.config import BUNDLED_MODEL, EngineConfig
from workers.server import WorkerServer

HOST = "127.0.0.1"
ENGINE = EngineConfig(max_total_tokens=16_384, max_running_requests=8)


@dataclass
class Harness:
    """Workers and a router, and where to reach them."""

    router: RouterServer
    workers: dict[str, WorkerServer]
    addresses: dict[str, WorkerAddress]
    url: str
    grpc_target: str

    async def start_worker(self, worker_id: str, incarnation: int, engine: EngineConfig) -> None:
        server = WorkerServer(worker_id, incarnation, engine)
        address = await server.start(HOST)
        self.workers[worker_id] = server
        self.addresses[worker_id] = WorkerAddress(worker_id, incarnation, address, engine.max_running_requests)
        await self.announce()

    async def announce(self) -> None:
        await self.router.set_workers(list(self.addresses.values()))
        await until(lambda: len(self.router.gateway.alive_links()) == len(self.addresses), 20, "workers to be reached")

    async def lose_worker(self, worker_id: str) -> None:
        """Stop a worker under its streams, as its death would look from the router."""
        server = self.workers.pop(worker_id)
        del self.addresses[worker_id]
        await server.stop()

    def pinned_to(self, session_id: str) -> str:
        session = self.router.gateway.sessions._sessions[session_id]
        return session.record.worker.split("@")[0]

    async def assert_no_leak(self) -> None:
        """Every live worker's audit is clean, and nothing runs."""
        await until(lambda: not self.router.gateway.live_turns(), 10, "turns to end")
        for server in self.workers.values():
            await until(lambda s=server: not s._leader.scheduler.turns, 10, "the engine to be idle")
            report = server._leader.audit().result(10)
            assert report.ok and report.num_running == 0, report

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.grpc_target)


@asynccontextmanager
async def running(
    tmp_path: Path, *, num_workers: int = 2, engine: EngineConfig = ENGINE, **router_settings: object
) -> AsyncIterator[Harness]:
    config = RouterConfig(
        model=engine.model,
        served_model_name="holdfast-tiny",
        host=HOST,
        port=0,
        grpc_port=0,
        journal_path=tmp_path / "journal.db",
    )
    router = RouterServer(replace(config, **router_settings))  # type: ignore[arg-type]
    port, grpc_port = await router.start()
    harness = Harness(router, {}, {}, f"http://{HOST}:{port}", f"{HOST}:{grpc_port}")
    try:
        for i in range(num_workers):
            await harness.start_worker(f"w{i}", 1, engine)
        yield harness
    finally:
        await router.stop()
        for server in harness.workers.values():
            await server.stop()


def model_copy(folder: Path) -> Path:
    """The bundled model's folder, with files that a test may change."""
    folder.mkdir()
    for path in BUNDLED_MODEL.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder
