"""The supervisors of a cluster that outlives the command which started it: two actors, of which one leads.

Each has what the other needs to go on (``Charge``): Ray keeps what actors are made with, so secrets go from process to
process. The one that leads starts another as its standby when there is none, on another node if the journal allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayError
from ray.util import get_placement_group, placement_group_table, remove_placement_group

from cluster.config import Config
from cluster.leadership import Leadership, stand
from cluster.ray_backend.cluster import Charge, Cluster, note_stop
from cluster.ray_backend.processes import (
    actor_options,
    answer_of,
    end_on_node,
    find_actor,
    living_nodes,
    on_node,
    ray_errors,
)
from cluster.ray_backend.router_process import RouterProcess
from holdfast.deadlines import within
from holdfast.errors import HoldfastError, NoWorkerAvailable, StaleEpoch
from holdfast.processes import NodeProcess
from router.fleet.link import WorkerAddress
from router.journal.supervision import LeaseStore, RedisLease, SqliteLease
from workers.store.folders import remove_stale

log = logging.getLogger("holdfast.cluster")
SLOTS = ("supervisor-0", "supervisor-1")
STANDBY_CHECK_S = 1.0
SILENCE_S = 15.0
"""A standby that does not answer for this long is replaced."""
RETRY_S = 1.0
POLL_S = 0.2
KNOWN_S = 10.0
"""All nodes know of each other within this time."""
LEADER_WAIT_S = 20.0
"""How long no supervisor may lead: some leases, and the start of an actor."""
STOP_ALLOWANCE_S = 60.0
CHARGE_WAIT_S = 10.0
"""A supervisor that is not told of its cluster for this long ends itself: whoever started it died meanwhile."""
EXIT_S = 1.0
"""Until a supervisor that has stopped its cluster ends itself: its answer is sent by then."""


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """What a supervisor says of itself. ``epoch``: of its lease; 0: another leads. ``error``: why the cluster does not
    start; it goes on trying.
    """

    epoch: int = 0
    ready: bool = False
    error: HoldfastError | None = None
    urls: tuple[str, ...] = ()
    grpc_urls: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkersNow:
    """The workers that serve, ``num_inherited`` of them the generation before's. ``epoch``: of who says so."""

    addresses: tuple[WorkerAddress, ...]
    num_inherited: int
    epoch: int


@ray.remote
class SupervisorActor:
    """One of a cluster's supervisors. It ends itself if ``serve`` is not called: no other could have its name."""

    def __init__(self) -> None:
        self._orphaned = threading.Timer(CHARGE_WAIT_S, os._exit, (1,))
        self._orphaned.daemon = True
        self._orphaned.start()

    async def serve(self, charge: Charge, slot: str, partner: NodeProcess | None) -> None:
        """Stand for the lease from now on. ``slot``: this actor's name; ``partner``: the supervisor that leads.

        Raises ConfigError, JournalUnavailable.
        """
        self._orphaned.cancel()
        self._charge, self._slot, self._partner = charge, slot, partner
        self._leases = _open_leases(charge)
        process = await self.process()
        holder = f"{slot}, pid {process.pid} on node {process.node_id[:8]}, {uuid.uuid4().hex[:8]}"
        self._leadership = Leadership(self._leases, holder)
        self._cluster: Cluster | None = None
        self._state = SupervisorState()
        self._standing = asyncio.create_task(stand(self._leadership, self._lead))

    async def state(self) -> SupervisorState:
        if not self._leadership.is_valid:
            return SupervisorState()
        return self._state if self._state.epoch else SupervisorState(self._leadership.epoch)

    async def charge(self) -> Charge:
        return self._charge

    async def process(self) -> NodeProcess:
        return NodeProcess.this(ray.get_runtime_context().get_node_id())

    async def know(self, charge: Charge) -> None:
        """What this supervisor leads with, if it ever leads."""
        self._charge = charge

    async def upgrade(self, config: Config) -> None:
        """Start workers with these settings from now on. Raises StaleEpoch if another leads, NoWorkerAvailable."""
        self._leadership.check()
        if self._cluster is None:
            raise NoWorkerAvailable("the cluster does not serve yet; upgrade it when it does")
        await self._tell_all(replace(self._charge, config=config, before=self._charge.config))
        self._cluster.reconfigure(config)

    async def stop(self) -> None:
        """Stop the cluster, and whoever stands by. Raises StaleEpoch if another leads."""
        self._leadership.check()
        cluster = self._cluster
        self._standing.cancel()
        await asyncio.gather(self._standing, return_exceptions=True)
        await end_actor(_other(self._slot), self._partner)
        if cluster is not None:
            await cluster.stop()
        await end_everything(but=self._slot)  # also what was just being started
        await self._leadership.give_up()
        await self._leases.close()
        # Nobody may be left to end this process: whoever asked for the stop may be gone.
        asyncio.get_running_loop().call_later(EXIT_S, os._exit, 0)

    async def hand_over(self) -> Charge:
        """Lead no longer: the cluster's next generation does, with what this returns. All that runs here serves on.

        Call when no other supervisor of this generation is left. Raises StaleEpoch if another leads, NoWorkerAvailable
        while the cluster is not whole yet.
        """
        self._leadership.check()
        cluster = self._cluster
        if cluster is None or cluster.num_inherited:
            raise NoWorkerAvailable("the cluster is just starting")
        charge = replace(self._charge, ports=cluster.ports, inherited=cluster.to_inherit())
        self._standing.cancel()
        await asyncio.gather(self._standing, return_exceptions=True)
        self._retiring = cluster.routers
        await asyncio.gather(*(router.share_ports() for router in self._retiring))
        await self._leadership.give_up()
        return charge

    async def announce(self, workers: list[WorkerAddress], epoch: int) -> None:
        """Tell routers that have been handed over of the workers there are now."""
        await self._ask_retiring(lambda router: router.set_workers(workers, epoch))

    async def retire(self) -> None:
        """Returns when the last turn of the routers that have been handed over has ended; others take new ones."""
        await self._ask_retiring(lambda router: router.retire())

    async def _ask_retiring(self, ask: Callable[[RouterProcess], Coroutine[Any, Any, None]]) -> None:
        asked = await asyncio.gather(*map(ask, self._retiring), return_exceptions=True)
        for error in asked:
            if error is not None:  # it has retired, or was lost: its turns are resumed at the next generation's
                log.info("a router of the generation before: %s", error)

    async def workers(self) -> WorkersNow:
        """Which there are. Raises StaleEpoch if another leads, NoWorkerAvailable while nothing serves."""
        self._leadership.check()
        if self._cluster is None:
            raise NoWorkerAvailable("the cluster does not serve yet")
        addresses = tuple(self._cluster.worker_addresses())
        return WorkersNow(addresses, self._cluster.num_inherited, self._leadership.epoch)

    async def _tell_all(self, charge: Charge) -> None:
        """Both supervisors lead with this from now on: first the one that stands by."""
        standby = find_actor(_other(self._slot))
        if standby is not None:
            await answer_of(standby.know.remote(charge), SILENCE_S)  # else it is replaced, and told then
        self._charge = charge

    async def _lead(self) -> None:
        """Run the cluster until cancelled."""
        standby = asyncio.create_task(self._keep_standby())
        try:
            self._cluster = cluster = await self._take_over()
            await cluster.wait_until_whole()  # the leader before may have died while it started the cluster
            await self._tell_all(replace(self._charge, ports=cluster.ports))
            self._state = SupervisorState(
                self._leadership.epoch, True, None, tuple(cluster.urls), tuple(cluster.grpc_urls)
            )
            await asyncio.Future()
        finally:
            standby.cancel()
            self._state = SupervisorState()
            if self._cluster is not None:
                await self._cluster.leave()
                self._cluster = None

    async def _take_over(self) -> Cluster:
        """Returns the cluster when it serves."""
        while True:
            self._leadership.check()
            try:
                # Another each time: what the last attempt has started is found as what another supervisor has.
                cluster = Cluster(self._charge, self._leadership)
                await _end_strangers(cluster)
                await cluster.take_over()
            except HoldfastError as error:
                log.error("the cluster does not start: %s", error)
                self._state = SupervisorState(self._leadership.epoch, error=error)
                await asyncio.sleep(RETRY_S)
            else:
                return cluster

    async def _keep_standby(self) -> None:
        """Start another supervisor when there is none, when it does not answer, or when it could be on another node."""
        other = _other(self._slot)
        this = await self.process()
        while True:
            await asyncio.sleep(STANDBY_CHECK_S)
            try:
                # In threads: calls of Ray's wait for a GCS that is gone, and the lease is renewed meanwhile.
                standby = await asyncio.to_thread(find_actor, other)
                process = await answer_of(standby.process.remote(), SILENCE_S) if standby is not None else None
                self._partner = process or self._partner
                node = await asyncio.to_thread(self._standby_node, this.node_id)
                if process is not None and (process.node_id != this.node_id or node == this.node_id):
                    continue
                self._leadership.check()
                await end_actor(other, self._partner)
                await start_supervisor(self._charge, other, node, this)
            except (HoldfastError, RayError, TimeoutError) as error:
                log.warning("no supervisor stands by: %s", error)

    def _standby_node(self, here: str) -> str:
        """Another than the leader's, if there is one. A journal in a file is reached from its node alone."""
        if self._charge.config.journal_url is None:
            return self._charge.node
        return min(living_nodes() - {here}, default=here)


async def start_supervisor(charge: Charge, slot: str, node: str, partner: NodeProcess | None = None) -> Any:
    """Start a supervisor on a node. Returns its actor. Raises HoldfastError."""
    actor_class: Any = SupervisorActor
    options = actor_options(slot, detached=True)

    def create() -> Any:
        there = on_node(node, or_elsewhere=charge.config.journal_url is not None)
        return actor_class.options(num_cpus=0, scheduling_strategy=there, **options).remote()

    loop = asyncio.get_running_loop()
    deadline = loop.time() + KNOWN_S
    while True:
        with ray_errors("a supervisor did not start"):
            # In a thread: it waits for a GCS that is gone.
            actor = await asyncio.to_thread(create)
            try:
                await actor.serve.remote(charge, slot, partner)
                return actor
            except RayError as error:
                ray.kill(actor)
                if not isinstance(error, ActorUnschedulableError) or loop.time() > deadline:
                    raise
        await asyncio.sleep(POLL_S)


async def find_leader() -> tuple[Any, SupervisorState] | None:
    """The supervisor that leads; None: none does now."""
    for slot in SLOTS:
        actor = find_actor(slot)
        if actor is None:
            continue
        state: SupervisorState | None = await answer_of(actor.state.remote(), STANDBY_CHECK_S)
        if state is not None and state.epoch:
            return actor, state
    return None


async def wait_for_leader() -> tuple[Any, SupervisorState]:
    """The supervisor that leads. Raises HoldfastError if none does for too long."""
    deadline = asyncio.get_running_loop().time() + LEADER_WAIT_S
    while (found := await find_leader()) is None:
        if asyncio.get_running_loop().time() > deadline:
            raise no_leader()
        await asyncio.sleep(POLL_S)
    return found


def no_leader() -> HoldfastError:
    return HoldfastError(f"no supervisor leads within {LEADER_WAIT_S:g} s; `holdfast stop --force` kills everything")


async def wait_until_ready() -> SupervisorState:
    """Returns when the cluster serves. Raises the HoldfastError for which it does not start."""
    while True:
        _, state = await wait_for_leader()
        if state.error is not None:
            raise state.error
        if state.ready:
            return state
        await asyncio.sleep(POLL_S)


async def stop_cluster() -> bool:
    """Have the supervisor that leads stop the cluster. Returns whether there was one. Raises HoldfastError."""
    deadline = asyncio.get_running_loop().time() + LEADER_WAIT_S
    while any(find_actor(slot) is not None for slot in SLOTS):
        found = await find_leader()
        if found is not None:
            actor, _ = found
            # Where it has just lost its lease, another will lead.
            with contextlib.suppress(StaleEpoch), ray_errors("the cluster did not stop"):
                config = (await actor.charge.remote()).config
                await within(config.drain_timeout_s + STOP_ALLOWANCE_S, actor.stop.remote())
                for slot in SLOTS:
                    await end_actor(slot)
                return True
        if asyncio.get_running_loop().time() > deadline:
            raise no_leader()
        await asyncio.sleep(POLL_S)
    return False


async def end_everything(but: str = "") -> None:
    """Kill all actors of the cluster, supervisors first, and remove what their KV stores have left on this node.

    Nobody starts it again. ``but``: the caller.
    """
    for slot in SLOTS:
        if slot != but:
            await end_actor(slot)
    await asyncio.gather(*(end_actor(name) for name in ray.util.list_named_actors() if name != but))
    for group in placement_group_table().values():
        if group["name"].startswith("worker-") and group["state"] != "REMOVED":
            remove_placement_group(get_placement_group(group["name"]))
    remove_stale()
    await asyncio.to_thread(note_stop)


async def _end_strangers(cluster: Cluster) -> None:
    """End what is left of a cluster with other settings, and is no part of this one."""
    strangers = set(ray.util.list_named_actors()) - {*SLOTS, *cluster.actor_names()}
    await asyncio.gather(*map(end_actor, sorted(strangers)))


def _other(slot: str) -> str:
    return SLOTS[1 - SLOTS.index(slot)]


async def end_actor(name: str, process: NodeProcess | None = None) -> None:
    """End an actor whatever state it is in. ``process``: of the one that had the name last, if it is known: it may have
    been stopped, and then it ends only when it is killed.
    """
    actor = find_actor(name)
    if actor is not None:
        process = await answer_of(actor.process.remote(), STANDBY_CHECK_S) or process
        ray.kill(actor)
    if process is not None and process.node_id in living_nodes():
        await end_on_node(process)


def _open_leases(charge: Charge) -> LeaseStore:
    config = charge.config
    if config.journal_url is not None:
        return RedisLease(config.journal_url)
    return SqliteLease.open(config.journal_path)
