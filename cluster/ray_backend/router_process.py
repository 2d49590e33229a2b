"""A router on Ray: fixed ports, and one actor after another that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.ray_backend.processes import death_of, end_process, first_of, ray_errors, unanswered_for
from holdfast.tls import ROUTER, Identity
from router.actor import RouterActor
from router.config import RouterConfig
from router.fleet.link import WorkerAddress
from router.journal.interface import ROUTER_LEASE_S

SILENCE_S = 2 * ROUTER_LEASE_S
"""After one lease, other routers may take its turns. After two, its own writes are refused anyway."""


class RouterProcess:
    """One router on this node, where its ports and its journal file are."""

    def __init__(self, index: int, config: RouterConfig, issue: Callable[[str], Identity | None]) -> None:
        self.index, self._issue = index, issue
        self.name = f"router {index}"
        self.config = config
        self.serves = False
        self._actor: Any = None
        self._process: tuple[int, float] | None = None

    async def start(self, workers: list[WorkerAddress]) -> None:
        name = f"router-{os.getpid()}-{self.index}-{time.time_ns()}"
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"name": name, "num_cpus": 0, "scheduling_strategy": here}
        actor_class: Any = RouterActor
        self._actor = actor_class.options(**options).remote(replace(self.config, journal_url=None))
        with ray_errors(f"{self.name} did not start"):
            self._process = await self._actor.process.remote()
            await self.renew()
            port, grpc_port = await self._actor.start.remote(workers, self.config.journal_url)
        # The next actor serves on the same ports.
        self.config = replace(self.config, port=port, grpc_port=grpc_port)
        self.serves = True

    async def renew(self) -> None:
        """Give the router a new certificate."""
        await self._actor.use_identity.remote(self._issue(ROUTER))

    async def set_workers(self, workers: list[WorkerAddress]) -> None:
        with ray_errors(f"{self.name} does not answer"):
            await self._actor.set_workers.remote(workers)

    async def ready_workers(self) -> list[str]:
        with ray_errors(f"{self.name} does not answer"):
            ready: list[str] = await self._actor.ready_workers.remote()
            return ready

    async def rebalance(self, max_sessions: int) -> int:
        with ray_errors(f"{self.name} does not answer"):
            num_migrated: int = await self._actor.rebalance.remote(max_sessions)
            return num_migrated

    async def failed(self) -> str:
        """Returns when the process died, or has not answered for ``SILENCE_S``: a stopped process does not die."""
        return await first_of(death_of(self._actor, "the process"), self._silence())

    async def end(self) -> None:
        self.serves = False
        if self._actor is not None:
            ray.kill(self._actor)
        if self._process is not None:
            process, self._process = self._process, None
            # Its ports must be free for the next process.
            await asyncio.to_thread(end_process, *process)

    async def _silence(self) -> str:
        await unanswered_for(SILENCE_S, self._actor.process.remote)
        return f"the process has not answered for {SILENCE_S} s"

    async def stop(self, timeout_s: float) -> None:
        """Give its live turns time to end, then end it."""
        if self.serves:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._actor.stop.remote(), timeout_s)
        await self.end()
