"""Starts a cluster on Ray, keeps its workers alive, and takes it down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.config import Config
from cluster.worker_group import WorkerGroup
from holdfast.errors import ConfigError, HoldfastError, NoWorkerAvailable
from router.actor import RouterActor
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
        self.http_port = 0
        self.grpc_port = 0
        self._engine = config.engine()
        self._workers: list[WorkerGroup] = []
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
        await asyncio.gather(*(worker.stop(STOP_TIMEOUT_S) for worker in self._workers))
        if self._router is not None:
            ray.kill(self._router)

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
