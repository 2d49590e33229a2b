"""Starts a cluster on Ray, keeps its workers alive, and takes it down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import Config
from cluster.worker_group import WorkerGroup
from holdfast.errors import ConfigError, HoldfastError, NoWorkerAvailable
from router.actor import RouterActor
from router.config import RouterConfig
from router.workers import WorkerAddress

log = logging.getLogger("holdfast.cluster")
NAMESPACE = "holdfast"
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Ray's object store carries only addresses and settings here: tokens go by gRPC."""
STOP_TIMEOUT_S = 5.0
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
        # By default Ray would join whatever cluster it finds on this machine.
        address="local",
        # Logical: a place for each rank, however many cores there are.
        num_cpus=config.workers * config.tp,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address=LOOPBACK,
        **common,
    )


class Cluster:
    """A router and its workers. ``connect`` comes first."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._engine = config.engine()
        self._workers: list[WorkerGroup] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._routers: list[_Router] = []
        self._stopping = False

    @property
    def urls(self) -> list[str]:
        """Of all routers, HTTP."""
        return [f"http://{router.config.host}:{router.config.port}" for router in self._routers]

    @property
    def grpc_urls(self) -> list[str]:
        return [f"grpc://{router.config.host}:{router.config.grpc_port}" for router in self._routers]

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def grpc_url(self) -> str:
        return self.grpc_urls[0]

    async def start(self) -> None:
        """Start everything; returns when the router reaches every worker. Raises HoldfastError."""
        self._routers = [_Router(i, self.config.router(i)) for i in range(self.config.routers)]
        routers_started = asyncio.gather(*(router.start([]) for router in self._routers))
        config, ranks = self.config, self.config.workers * self.config.tp
        use_gpu = self._engine.device == "cuda" or (
            self._engine.device == "auto" and ray.cluster_resources().get("GPU", 0) >= ranks
        )
        host = LOOPBACK if config.address is None else None
        self._workers = [
            WorkerGroup(
                f"worker-{i}", config.tp, self._engine, use_gpu=use_gpu, strategy=config.tp_placement, host=host
            )
            for i in range(config.workers)
        ]
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                # Together: loading is the slow part, and the cores share it anyway.
                await asyncio.gather(*(worker.start() for worker in self._workers))
                await routers_started
                await self._announce()
                for router in self._routers:
                    while len(await router.actor.ready_workers.remote()) < len(self._workers):
                        await asyncio.sleep(0.02)
        except TimeoutError:
            raise NoWorkerAvailable(f"the cluster did not start within {self.config.start_timeout_s} s") from None
        except RayError as error:
            raise _cause(error) from None
        self._keepers = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
        self._keepers += [asyncio.create_task(self._keep_router(router)) for router in self._routers]
        if self.config.rebalance_per_s:
            self._keepers.append(asyncio.create_task(self._keep_balance(self.config.rebalance_per_s)))

    async def stop(self) -> None:
        """Let live turns end, then take everything down."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        timeout_s = self.config.drain_timeout_s + STOP_TIMEOUT_S
        await asyncio.gather(*(router.stop(timeout_s) for router in self._routers))
        await asyncio.gather(*(worker.stop(STOP_TIMEOUT_S) for worker in self._workers))

    def worker_addresses(self) -> list[WorkerAddress]:
        """The workers that live now."""
        return [worker.address for worker in self._workers if worker.address is not None]

    # ---- workers ------------------------------------------------------------------------------------

    async def _keep(self, worker: WorkerGroup) -> None:
        """Wait for the worker to break, and start its next incarnation; for ever."""
        while not self._stopping:
            reason = await worker.broken()
            log.warning("%s: %s; starting its next incarnation", worker.worker_id, reason)
            worker.address = None
            await self._announce()
            await worker.end()
            while worker.address is None:
                try:
                    await asyncio.wait_for(worker.start(), self.config.start_timeout_s)
                except (RayError, TimeoutError) as error:
                    log.error("%s does not start: %s; trying again", worker.worker_id, error)
                    await worker.end()
                    await asyncio.sleep(RESTART_PAUSE_S)
            await self._announce()

    async def _keep_router(self, router: _Router) -> None:
        """Wait for the router to die, and start another on the same ports; for ever."""
        while not self._stopping:
            try:
                await router.actor.wait.remote()
            except RayError:
                log.warning("router %d died; starting another", router.index)
            router.serves = False
            while not router.serves:
                try:
                    await asyncio.wait_for(router.start(self.worker_addresses()), self.config.start_timeout_s)
                except (RayError, TimeoutError) as error:
                    log.error("router %d does not start: %s; trying again", router.index, error)
                    await asyncio.sleep(RESTART_PAUSE_S)
            await self._announce()  # what changed while it started

    async def _keep_balance(self, sessions_per_s: float) -> None:
        """Have a router move idle sessions to where there are few, no faster than it may; for ever.

        One asks for all routers: several that saw the same imbalance would turn it round.
        """
        pause_s = max(1.0, 1 / sessions_per_s)
        while True:
            await asyncio.sleep(pause_s)
            router = next((router for router in self._routers if router.serves), None)
            if router is None:
                continue
            try:
                await router.actor.rebalance.remote(max(1, int(sessions_per_s * pause_s)))
            except RayError as error:
                log.info("not rebalanced: %s", error)

    async def _announce(self) -> None:
        addresses = self.worker_addresses()
        tells = (router.actor.set_workers.remote(addresses) for router in self._routers if router.serves)
        for answer in await asyncio.gather(*tells, return_exceptions=True):
            if isinstance(answer, RayError):
                log.error("a router does not answer: %s", answer)
            elif isinstance(answer, BaseException):
                raise answer


class _Router:
    """One router's place: its settings and who fills it now."""

    def __init__(self, index: int, config: RouterConfig) -> None:
        self.index = index
        self.config = config
        self.actor: Any = None
        self.serves = False

    async def start(self, workers: list[WorkerAddress]) -> None:
        if self.actor is not None:
            ray.kill(self.actor)
        name = f"router-{os.getpid()}-{self.index}-{time.time_ns()}"
        # On this node, wherever there is room: here are its ports, its journal's file, and who was told of them.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = {"name": name, "num_cpus": 0, "scheduling_strategy": here}
        self.actor = RouterActor.options(**options).remote(self.config)  # type: ignore[attr-defined]
        port, grpc_port = await self.actor.start.remote(workers)
        # The next one serves where clients know this one.
        self.config = replace(self.config, port=port, grpc_port=grpc_port)
        self.serves = True

    async def stop(self, timeout_s: float) -> None:
        if self.serves:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(self.actor.stop.remote(), timeout_s)
        if self.actor is not None:
            ray.kill(self.actor)


def _cause(error: RayError) -> HoldfastError:
    """What failed inside an actor, as the user should read it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, HoldfastError):
        return cause
    return ConfigError(f"the cluster did not start: {cause or error}")
