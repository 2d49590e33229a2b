"""A worker on Ray: a placement group, and one incarnation of rank actors in it after another."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray.exceptions import ActorAlreadyExistsError
from ray.util import get_placement_group, placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.ray_backend.inherited import Inherited
from cluster.ray_backend.processes import (
    actor_options,
    answer_of,
    death_of,
    end_on_node,
    find_actor,
    first_of,
    kill_actors,
    ray_errors,
    unanswered_for,
)
from holdfast import tls
from holdfast.deadlines import within
from holdfast.processes import NodeProcess
from holdfast.tls import LEADER, RANK, Identity
from router.fleet.link import WorkerAddress
from workers.config import EngineConfig
from workers.serving.actor import RankActor, ServingRank

log = logging.getLogger("holdfast.cluster")


class WorkerGroup:
    """The ranks of one worker. They start together and end together."""

    def __init__(
        self,
        worker_id: str,
        size: int,
        config: EngineConfig,
        *,
        use_gpu: bool,
        strategy: str,
        host: str | None,
        issue: Callable[[str], Identity | None],
        detached: bool,
        before: EngineConfig | None,
    ) -> None:
        """``detached``: its processes run on when the one that started them ends. ``before``: what an incarnation may
        still have that started before the last upgrade.
        """
        self.name = worker_id
        self.size = size
        self.address: WorkerAddress | None = None
        """The leader's address, while an incarnation serves."""
        self._config, self._before = config, before
        self._bundle = {"CPU": 1.0} | ({"GPU": 1.0} if use_gpu else {})
        self._strategy = strategy
        self._host, self._issue = host, issue
        self._placement: PlacementGroup | None = None
        self._placed = False
        self._actors: list[Any] = []
        self._processes: list[NodeProcess] = []
        self._serving: list[ServingRank] = []
        self._detached = detached

    async def adopt(self) -> bool:
        """Find the incarnation that another supervisor has started. Returns whether it serves, with its settings."""
        self._actors, self._placement = self._find_actors(), self._find_placement()
        # Of each that answers, so that ``end`` ends it whatever the others do.
        processes = await asyncio.gather(*(answer_of(actor.process.remote()) for actor in self._actors))
        self._processes = [process for process in processes if process is not None]
        serving = await asyncio.gather(*(answer_of(actor.serving.remote()) for actor in self._actors))
        ranks = [rank for rank in serving if rank is not None and rank.config in (self._config, self._before)]
        if len(ranks) != self.size or len({rank.incarnation for rank in ranks}) != 1 or self._placement is None:
            return False
        self._serves(ranks)
        return True

    def reconfigure(self, config: EngineConfig) -> None:
        """Its next incarnation has other settings."""
        self._config, self._before = config, self._config

    async def start(self) -> None:
        """Start a new incarnation; returns when it serves. Raises HoldfastError."""
        with ray_errors(f"{self.name} did not start"):
            await self._start()

    async def _start(self) -> None:
        if self._placement is None:
            # Of a name of its own: that of one which is being removed is taken for a while.
            options = {"name": f"{self.name}:{time.time_ns()}", "lifetime": "detached"} if self._detached else {}
            self._placement = placement_group([self._bundle] * self.size, strategy=self._strategy, **options)
        self._placed = False
        await self._placement.ready()
        self._placed = True
        # Unique across restarts of the whole cluster: no old pin may name a new incarnation.
        incarnation = time.time_ns() // 1_000_000
        try:
            self._actors = [self._actor(rank, incarnation) for rank in range(self.size)]
        except ActorAlreadyExistsError:
            # Another supervisor's, which was late: whoever still leads then ends them, and tries again.
            self._actors = self._find_actors()
            raise
        # Known before they load anything, so that ``end`` can end them wherever they hang.
        self._processes = await asyncio.gather(*(actor.process.remote() for actor in self._actors))
        await self.renew()
        store = await self._actors[0].open_store.remote() if self.size > 1 else None
        self._serves(await asyncio.gather(*(actor.start.remote(store) for actor in self._actors)))

    def _serves(self, ranks: list[ServingRank]) -> None:
        self._serving, leader = ranks, ranks[0]
        self.address = WorkerAddress(self.name, leader.incarnation, leader.address, self._config.max_running_requests)

    async def renew(self) -> None:
        """Give every rank a new certificate."""
        roles = [RANK if rank else LEADER for rank in range(len(self._actors))]
        gives = [a.use_identity.remote(self._issue(role)) for a, role in zip(self._actors, roles, strict=True)]
        await asyncio.gather(*gives)

    async def failed(self) -> str:
        """Returns, with the reason, when a rank has died or the leader does not answer within the lease."""
        deaths = [death_of(actor, f"rank {rank}") for rank, actor in enumerate(self._actors)]
        return await first_of(*deaths, self._silence())

    async def end(self) -> None:
        """End every process of this incarnation, whatever state it is in; returns when they are gone.

        If a node was lost, so is the placement group: the next incarnation creates a new one.
        """
        self.address = None
        alive = await kill_actors(self._actors)
        processes, self._actors, self._processes = self._processes, [], []
        # Ray asks a process to end, which does not work on one that is stopped.
        ends = [end_on_node(process) for process in processes if process.node_id in alive]
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, BaseException):
                log.error("a process of %s may still run, because its node does not answer: %r", self.name, result)
        if any(process.node_id not in alive for process in processes):
            self.remove_placement()

    async def stop(self, timeout_s: float) -> None:
        """Stop every rank in order, then ``end`` those that still run."""
        serving = self._actors if self.address is not None else []
        for method in ("expect_end", "stop"):
            calls = [within(timeout_s, getattr(actor, method).remote()) for actor in serving]
            await asyncio.gather(*calls, return_exceptions=True)
        await self.end()
        self.remove_placement()

    @property
    def waits_for(self) -> str:
        if self._placement is None or self._placed:
            return ""
        each = " and ".join(f"{number:g} {what}" for what, number in self._bundle.items())
        return f"Ray to have {each} free" + (f" for each of {self.size} ranks" if self.size > 1 else "")

    def to_inherit(self) -> Inherited:
        """The incarnation that serves, for the cluster's next generation."""
        assert self.address is not None, "it serves"
        return Inherited(self.address, tuple(self._processes), has_room="GPU" not in self._bundle)

    def nodes(self) -> list[str]:
        """The nodes of the incarnation's ranks, by their ids."""
        return [process.node_id for process in self._processes]

    def kv_bytes(self, node: str) -> int:
        """What the pools of the incarnation's ranks on a node hold."""
        ranks = zip(self._serving, self._processes, strict=False)
        return sum(rank.kv_bytes for rank, process in ranks if process.node_id == node)

    def remove_placement(self) -> None:
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    # ---- inside -----------------------------------------------------------------------------------

    def actor_names(self) -> list[str]:
        """Of its ranks, as Ray knows them."""
        return [f"{self.name}/{rank}" for rank in range(self.size)]

    def _find_actors(self) -> list[Any]:
        found = map(find_actor, self.actor_names())
        return [actor for actor in found if actor is not None]

    def _find_placement(self) -> PlacementGroup | None:
        """The latest that another supervisor created."""
        groups = placement_group_table().values()
        names = [group["name"] for group in groups if group["state"] != "REMOVED"]
        names = sorted(name for name in names if name.startswith(f"{self.name}:"))
        return get_placement_group(names[-1]) if names else None

    def _actor(self, rank: int, incarnation: int) -> Any:
        actor_class: Any = RankActor
        return actor_class.options(
            **actor_options(self.actor_names()[rank], detached=self._detached),
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=rank),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(self._config.num_threads)}},
        ).remote(self.name, incarnation, rank, self.size, self._config, self._host)

    async def _silence(self) -> str:
        """Returns when the leader has not answered for a lease: a stopped process does not die."""
        lease_s = self._config.rank_lease_s
        assert self.address is not None, "the worker serves"
        async with tls.channel(self.address.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await unanswered_for(lease_s, lambda: stub.Check(health_pb2.HealthCheckRequest()))
        return f"the leader has not answered for {lease_s} s"
