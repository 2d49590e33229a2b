"""The Ray actor around a router."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from dataclasses import replace

import psutil
import ray

from holdfast import tls
from holdfast.tls import Identity
from router.config import RouterConfig
from router.fleet.link import WorkerAddress


@ray.remote
class RouterActor:
    """One router. Serves until it is stopped or killed.

    ``config``: without ``journal_url``, which may have a password. Ray keeps what actors are made with; what their
    methods are given goes to their process alone.
    """

    def __init__(self, config: RouterConfig) -> None:
        assert config.journal_url is None
        self._config = config
        self._stopped = asyncio.Event()

    async def start(self, workers: list[WorkerAddress], journal_url: str | None) -> tuple[int, int]:
        """Start to serve. Returns the HTTP and the gRPC port."""
        # Keep transformers from importing torch, which takes 270 MB and most of the start's time, and which
        # a router does not use.
        sys.modules["torch"] = None  # type: ignore[assignment]  # None makes `import torch` fail
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
        # Imported here, because only the router's own process needs the tokenizer.
        from router.app import RouterServer

        control_plane = ray.get_runtime_context().gcs_address
        self._server = RouterServer(replace(self._config, control_plane=control_plane, journal_url=journal_url))
        await self._server.set_workers(workers)
        ports = await self._server.start()
        # What was loaded stays: streams need not wait while garbage is looked for among it.
        gc.collect()
        gc.freeze()
        return ports

    async def set_workers(self, workers: list[WorkerAddress]) -> None:
        await self._server.set_workers(workers)

    async def use_identity(self, identity: Identity | None) -> None:
        """Who this process is, before it starts to serve, and again when its certificate is renewed."""
        tls.use_identity(identity)

    async def process(self) -> tuple[int, float]:
        """The process's pid and start time: pids are reused."""
        return os.getpid(), psutil.Process().create_time()

    async def ready_workers(self) -> list[str]:
        """The workers that this router reaches."""
        return [link.name for link in self._server.core.fleet.alive()]

    async def rebalance(self, max_sessions: int) -> int:
        """Migrate idle sessions from a worker with many to one with few. Returns how many were migrated."""
        return await self._server.core.migrator.rebalance(max_sessions)

    async def wait(self) -> None:
        """Returns when the router was stopped. Ray raises ActorDiedError when its process died."""
        await self._stopped.wait()

    async def stop(self) -> None:
        await self._server.stop()
        self._stopped.set()
