"""Starts a cluster on Ray, keeps its workers alive, and takes it down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import Config
from holdfast.errors import ConfigError, HoldfastError, NoWorkerAvailable
from router.actor import RouterActor
from router.workers import WorkerAddress
from workers.actor import WorkerActor

log = logging.getLogger("holdfast.cluster")
NAMESPACE = "holdfast"
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Ray's object store carries only addresses and settings here: tokens go by gRPC."""
RESTART_PAUSE_S = 1.0
"""Between a failed start and the next: a worker that cannot start must not spin."""


def connect(config: Config) -> None:
    """Join the Ray cluster of ``config.address``, or start one on this machine. Raises ConfigError."""
    # Ray warns that it will stop hiding GPUs from actors that ask for none; the new way is wanted.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": logging.ERROR, "log_to_driver": True}
    if config.address is not None:
        if config.address.startswith((LOOPBACK, "localhost")):
            # Ray would take this machine's outward address for its own, and look for the cluster there.
            common["_node_ip_address"] = LOOPBACK
        try:
            ray.init(address=config.address, **common)
        except ConnectionError as error:
            raise ConfigError(f"address: no Ray cluster answers at {config.address}: {error}") from None
        return
    ray.init(
        # Logical: a place for each worker, however many cores there are.
        num_cpus=config.workers,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address=LOOPBACK,
        **common,
    )


@dataclass
class _Worker:
    """One worker's place, and who fills it now."""

    worker_id: str
    group: PlacementGroup
    actor: Any = None
    address: WorkerAddress | None = None
    num_starts: int = 0


class Cluster:
    """A router and its workers. ``connect`` comes first."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.http_port = 0
        self.grpc_port = 0
        self._engine = config.engine()
        self._workers: list[_Worker] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._router: Any = None
        self._stopping = False

    @property
    def url(self) -> str:
        return f"http://{self.config.host}:{self.http_port}"

    @property
    def grpc_url(self) -> str:
        return f"grpc://{self.config.host}:{self.grpc_port}"

    async def start(self) -> None:
        """Start everything; returns when the router reaches every worker. Raises HoldfastError."""
        self._router = RouterActor.options(name=f"router-{os.getpid()}", num_cpus=0).remote(self.config.router())
        router_started = self._router.start.remote([])
        use_gpu = self._engine.device == "cuda" or (
            self._engine.device == "auto" and ray.cluster_resources().get("GPU", 0) >= self.config.workers
        )
        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if use_gpu else {})
        for i in range(self.config.workers):
            group = placement_group([bundle], strategy="STRICT_PACK")
            self._workers.append(_Worker(f"worker-{i}", group))
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                # Together: loading is the slow part, and the cores share it anyway.
                await asyncio.gather(*(self._start_worker(worker) for worker in self._workers))
                self.http_port, self.grpc_port = await router_started
                await self._announce()
                while len(await self._router.ready_workers.remote()) < len(self._workers):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise NoWorkerAvailable(f"the cluster did not start within {self.config.start_timeout_s} s") from None
        except RayError as error:
            raise _cause(error) from None
        self._keepers = [asyncio.create_task(self._keep(worker)) for worker in self._workers]

    async def stop(self) -> None:
        """Let live turns end, then take everything down."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        timeout_s = self.config.drain_timeout_s + 5.0
        if self.http_port:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(self._router.stop.remote(), timeout_s)
        actors = [worker.actor for worker in self._workers if worker.address is not None]
        stops = [asyncio.wait_for(actor.stop.remote(), 5.0) for actor in actors]
        await asyncio.gather(*stops, return_exceptions=True)
        for actor in [*(worker.actor for worker in self._workers), self._router]:
            if actor is not None:
                ray.kill(actor)
        for worker in self._workers:
            remove_placement_group(worker.group)

    def worker_addresses(self) -> list[WorkerAddress]:
        """The workers that live now."""
        return [worker.address for worker in self._workers if worker.address is not None]

    # ---- workers ------------------------------------------------------------------------------------

    async def _start_worker(self, worker: _Worker) -> None:
        await worker.group.ready()
        # New at each start, also across restarts of the whole cluster: old pins must not fit.
        incarnation = time.time_ns() // 1_000_000
        strategy = PlacementGroupSchedulingStrategy(worker.group, placement_group_bundle_index=0)
        bundle = worker.group.bundle_specs[0]
        worker.actor = WorkerActor.options(
            name=f"{worker.worker_id}-{incarnation}",
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(self._engine.num_threads)}},
        ).remote(worker.worker_id, incarnation, self._engine, LOOPBACK if self.config.address is None else None)
        address = await worker.actor.start.remote()
        worker.address = WorkerAddress(worker.worker_id, incarnation, address, self._engine.max_running_requests)
        worker.num_starts += 1

    async def _keep(self, worker: _Worker) -> None:
        """Wait for the worker to die, and start its next incarnation; for ever."""
        while not self._stopping:
            try:
                await worker.actor.wait.remote()
            except RayError:
                log.warning("%s died; starting its next incarnation", worker.worker_id)
            worker.address = None
            await self._announce()
            while worker.address is None:
                try:
                    await asyncio.wait_for(self._start_worker(worker), self.config.start_timeout_s)
                except (RayError, TimeoutError) as error:
                    log.error("%s does not start: %s; trying again", worker.worker_id, error)
                    ray.kill(worker.actor)
                    await asyncio.sleep(RESTART_PAUSE_S)
            await self._announce()

    async def _announce(self) -> None:
        try:
            await self._router.set_workers.remote(self.worker_addresses())
        except RayError as error:
            log.error("the router does not answer: %s", error)


def _cause(error: RayError) -> HoldfastError:
    """What failed inside an actor, as the user should read it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, HoldfastError):
        return cause
    return ConfigError(f"the cluster did not start: {cause or error}")
