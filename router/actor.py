"""The Ray actor around a router."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from dataclasses import replace

import ray

from holdfast import tls
from holdfast.processes import NodeProcess
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
        self._ports: tuple[int, int] | None = None

    async def start(
        self, workers: list[WorkerAddress], epoch: int, journal_url: str | None, *, shares_ports: bool
    ) -> tuple[int, int]:
        """Start to serve. Returns the HTTP and the gRPC port. ``shares_ports``: see ``RouterServer.start``."""
        # Keep transformers from importing torch, which takes 270 MB and most of the start's time, and which
        # a router does not use.
        sys.modules["torch"] = None  # type: ignore[assignment]  # None makes `import torch` fail
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
        # Imported here, because only the router's own process needs the tokenizer.
        from router.app import RouterServer

        control_plane = ray.get_runtime_context().gcs_address
        self._server = RouterServer(replace(self._config, control_plane=control_plane, journal_url=journal_url))
        await self._server.set_workers(workers, epoch)
        self._ports = await self._server.start(shares_ports=shares_ports)
        # What was loaded stays: streams need not wait while garbage is looked for among it.
        gc.collect()
        gc.freeze()
        return self._ports

    async def serving(self) -> tuple[RouterConfig, tuple[int, int]] | None:
        """What it was made with, and its ports; None: it does not serve yet."""
        return (self._config, self._ports) if self._ports is not None else None

    async def set_workers(self, workers: list[WorkerAddress], epoch: int) -> None:
        await self._server.set_workers(workers, epoch)

    async def use_identity(self, identity: Identity | None) -> None:
        """Who this process is, before it starts to serve, and again when its certificate is renewed."""
        tls.use_identity(identity)

    async def process(self) -> NodeProcess:
        return NodeProcess.this(ray.get_runtime_context().get_node_id())

    async def ready_workers(self) -> list[str]:
        """The workers that this router reaches."""
        return [link.name for link in self._server.core.fleet.alive()]

    async def rebalance(self, max_sessions: int) -> int:
        """Migrate idle sessions from a worker with many to one with few. Returns how many were migrated."""
        return await self._server.core.migrator.rebalance(max_sessions)

    async def drain(self, name: str, timeout_s: float) -> None:
        """Have a worker admit no more turns, and migrate its sessions to the others. See ``Migrator.drain``."""
        await self._server.core.migrator.drain(name, timeout_s)

    async def share_ports(self) -> None:
        """Another router is to start on this one's ports, which retires then."""
        self._server.share_ports()

    async def retire(self) -> None:
        """Returns when the last turn has ended: connections are another router's from now on."""
        await self._server.retire()
        self._stopped.set()

    async def wait(self) -> None:
        """Returns when the router was stopped. Ray raises ActorDiedError when its process died."""
        await self._stopped.wait()

    async def stop(self) -> None:
        await self._server.stop()
        self._stopped.set()
