"""The Ray actor around a worker's rank."""

from __future__ import annotations

import asyncio

import ray

from workers.config import EngineConfig


@ray.remote
class WorkerActor:
    """One worker of one rank: starts its server, then lives until it is stopped or killed."""

    def __init__(self, worker_id: str, incarnation: int, config: EngineConfig, host: str | None) -> None:
        self._identity = (worker_id, incarnation)
        self._config = config
        self._host = host or ray.util.get_node_ip_address()
        self._stopped = asyncio.Event()

    async def start(self) -> str:
        """Load the model and serve; returns the gRPC address."""
        # Not at the top: torch is imported in the worker's process alone.
        from workers.server import WorkerServer

        self._server = WorkerServer(*self._identity, self._config)
        return await self._server.start(self._host)

    async def wait(self) -> None:
        """Returns when the worker was stopped; fails with ActorDiedError when its process died."""
        await self._stopped.wait()

    async def stop(self) -> None:
        await self._server.stop()
        self._stopped.set()
