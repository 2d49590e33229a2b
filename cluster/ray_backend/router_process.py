"""A router on Ray: fixed ports, and one actor after another that serves them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorAlreadyExistsError, RayError

from cluster.ray_backend.processes import (
    actor_options,
    answer_of,
    death_of,
    end_on_node,
    find_actor,
    first_of,
    kill_actors,
    on_node,
    ray_errors,
    unanswered_for,
)
from holdfast.deadlines import within
from holdfast.processes import NodeProcess
from holdfast.tls import ROUTER, Identity
from router.actor import RouterActor
from router.config import RouterConfig
from router.fleet.link import WorkerAddress
from router.journal.interface import ROUTER_LEASE_S

SILENCE_S = 2 * ROUTER_LEASE_S
"""After one lease, other routers may take its turns. After two, its own writes are refused anyway."""


class RouterProcess:
    """One router on ``node``, where its ports and its journal file are.

    With a journal in Redis it starts on another node when that one is lost.
    """

    def __init__(
        self,
        index: int,
        config: RouterConfig,
        issue: Callable[[str], Identity | None],
        *,
        node: str,
        detached: bool,
        shares_ports: bool,
    ) -> None:
        """``shares_ports``: a router of the generation before may still listen on them."""
        self.index, self._issue = index, issue
        self._node, self._detached, self._shares_ports = node, detached, shares_ports
        self.name = f"router {index}"
        self.config = config
        self.serves = False
        self._actor: Any = None
        self._process: NodeProcess | None = None

    async def adopt(self) -> bool:
        """Find the process that another supervisor has started. Returns whether it serves, with these settings."""
        self._actor = find_actor(self.actor_name)
        if self._actor is None:
            return False
        self._process = await answer_of(self._actor.process.remote())
        serving = await answer_of(self._actor.serving.remote())
        if serving is not None and self._has_settings(*serving):
            self._serves(*serving[1])
        return self.serves

    async def start(self, workers: list[WorkerAddress], epoch: int) -> None:
        there = on_node(self._node, or_elsewhere=self.config.journal_url is not None)
        options = actor_options(self.actor_name, detached=self._detached)
        actor_class: Any = RouterActor
        with ray_errors(f"{self.name} did not start"):
            try:
                self._actor = actor_class.options(num_cpus=0, scheduling_strategy=there, **options).remote(
                    replace(self.config, journal_url=None)
                )
            except ActorAlreadyExistsError:
                # Another supervisor's, which was late: whoever still leads then ends it, and tries again.
                self._actor = find_actor(self.actor_name)
                raise
            self._process = await self._actor.process.remote()
            await self.renew()
            started = self._actor.start.remote(workers, epoch, self.config.journal_url, shares_ports=self._shares_ports)
            self._serves(*await started)

    @property
    def actor_name(self) -> str:
        return f"router-{self.index}"

    def _has_settings(self, config: RouterConfig, ports: tuple[int, int]) -> bool:
        chosen = replace(self.config, port=self.config.port or ports[0], grpc_port=self.config.grpc_port or ports[1])
        serves = replace(config, port=ports[0], grpc_port=ports[1])
        return serves == replace(chosen, journal_url=None)

    def _serves(self, port: int, grpc_port: int) -> None:
        # The next actor serves on the same ports.
        self.config = replace(self.config, port=port, grpc_port=grpc_port)
        self.serves = True

    async def renew(self) -> None:
        """Give the router a new certificate, if there is one."""
        if self._actor is not None:
            await self._actor.use_identity.remote(self._issue(ROUTER))

    async def set_workers(self, workers: list[WorkerAddress], epoch: int) -> None:
        with ray_errors(f"{self.name} does not answer"):
            await self._actor.set_workers.remote(workers, epoch)

    async def ready_workers(self) -> list[str]:
        with ray_errors(f"{self.name} does not answer"):
            ready: list[str] = await self._actor.ready_workers.remote()
            return ready

    async def rebalance(self, max_sessions: int) -> int:
        with ray_errors(f"{self.name} does not answer"):
            num_migrated: int = await self._actor.rebalance.remote(max_sessions)
            return num_migrated

    async def drain(self, name: str, timeout_s: float) -> None:
        with ray_errors(f"{self.name} does not answer"):
            await self._actor.drain.remote(name, timeout_s)

    async def share_ports(self) -> None:
        """Let a router of the next generation start on its ports."""
        with ray_errors(f"{self.name} does not answer"):
            await self._actor.share_ports.remote()

    async def retire(self) -> None:
        """Returns when its last turn has ended: new ones are the next generation's."""
        with ray_errors(f"{self.name} does not answer"):
            await self._actor.retire.remote()

    async def failed(self) -> str:
        """Returns when the process died, or has not answered for ``SILENCE_S``: a stopped process does not die."""
        return await first_of(death_of(self._actor, "the process"), self._silence())

    async def end(self) -> None:
        self.serves = False
        alive = await kill_actors([self._actor] if self._actor is not None else [])
        if self._process is not None:
            process, self._process = self._process, None
            if process.node_id in alive:
                await end_on_node(process)  # its ports must be free for the next process

    async def _silence(self) -> str:
        await unanswered_for(SILENCE_S, self._actor.process.remote)
        return f"the process has not answered for {SILENCE_S} s"

    async def stop(self, timeout_s: float) -> None:
        """Give its live turns time to end, then end it."""
        if self.serves:
            with contextlib.suppress(RayError, TimeoutError):
                await within(timeout_s, self._actor.stop.remote())
        await self.end()
