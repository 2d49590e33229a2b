"""The Ray actor around a router."""

from __future__ import annotations

import asyncio
import os
import sys

import psutil
import ray

from router.config import RouterConfig
from router.workers import WorkerAddress


@ray.remote
class RouterActor:
    """One router: serves until it is stopped or killed."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._stopped = asyncio.Event()

    async def start(self, workers: list[WorkerAddress]) -> tuple[int, int]:
        """Serve; returns the HTTP and the gRPC port."""
        # transformers would import torch where it finds it: 270 MB and more time than all the rest of a
        # start takes, for a process that computes nothing.
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
        # Not at the top: the tokenizer's imports are the router's process's alone.
        from router.app import RouterServer

        self._server = RouterServer(self._config)
        await self._server.set_workers(workers)
        return await self._server.start()

    async def set_workers(self, workers: list[WorkerAddress]) -> None:
        await self._server.set_workers(workers)

    async def process(self) -> tuple[int, float]:
        """The pid, and when it was created: a pid alone could be another's by now."""
        return os.getpid(), psutil.Process().create_time()

    async def ready_workers(self) -> list[str]:
        """The workers that this router reaches."""
        return [link.name for link in self._server.gateway.alive_links()]

    async def rebalance(self, max_moves: int) -> int:
        """Move idle sessions from a worker with many to one with few; returns how many moved."""
        return await self._server.gateway.moves.rebalance(max_moves)

    async def wait(self) -> None:
        """Returns when the router was stopped; fails with ActorDiedError when its process died."""
        await self._stopped.wait()

    async def stop(self) -> None:
        await self._server.stop()
        self._stopped.set()
