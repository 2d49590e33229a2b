"""A cluster on Ray: joins or starts Ray, fills the supervisor's places with actors, and takes all down."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray

from cluster.config import Config
from cluster.nodes import prepare_environment
from cluster.router_process import RouterProcess
from cluster.supervisor import Supervisor
from cluster.worker_group import WorkerGroup
from holdfast.errors import ConfigError, NoWorkerAvailable
from router.workers import WorkerAddress

NAMESPACE = "holdfast"
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""Ray's object store carries only addresses and settings here: tokens go by gRPC."""
STOP_TIMEOUT_S = 5.0


def connect(config: Config) -> None:
    """Join the Ray cluster of ``config.address``, or start one on this machine. Raises ConfigError."""
    prepare_environment()
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
    """Routers, workers, and their supervisor. ``connect`` comes first."""

    def __init__(self, config: Config) -> None:
        self.config = config
        engine = config.engine()
        num_ranks = config.workers * config.tp
        use_gpu = engine.device == "cuda" or (
            engine.device == "auto" and ray.cluster_resources().get("GPU", 0) >= num_ranks
        )
        self.routers = [RouterProcess(i, config.router(i)) for i in range(config.routers)]
        host = LOOPBACK if config.address is None else None
        self.workers = [
            WorkerGroup(f"worker-{i}", config.tp, engine, use_gpu=use_gpu, strategy=config.tp_placement, host=host)
            for i in range(config.workers)
        ]
        self._supervisor = Supervisor(
            self.workers,
            self.routers,
            start_timeout_s=config.start_timeout_s,
            rebalance_per_s=config.rebalance_per_s,
        )

    @property
    def urls(self) -> list[str]:
        """Of all routers, HTTP."""
        return [f"http://{router.config.host}:{router.config.port}" for router in self.routers]

    @property
    def grpc_urls(self) -> list[str]:
        return [f"grpc://{router.config.host}:{router.config.grpc_port}" for router in self.routers]

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def grpc_url(self) -> str:
        return self.grpc_urls[0]

    def worker_addresses(self) -> list[WorkerAddress]:
        """The workers that live now."""
        return self._supervisor.addresses()

    async def start(self) -> None:
        """Start everything; returns when the routers reach every worker. Raises HoldfastError."""
        try:
            await self._supervisor.start()
        except TimeoutError:
            raise NoWorkerAvailable(f"the cluster did not start within {self.config.start_timeout_s} s") from None

    async def stop(self) -> None:
        """Let live turns end, then take everything down."""
        await self._supervisor.stop()
        timeout_s = self.config.drain_timeout_s + STOP_TIMEOUT_S
        await asyncio.gather(*(router.stop(timeout_s) for router in self.routers))
        await asyncio.gather(*(worker.stop(STOP_TIMEOUT_S) for worker in self.workers))
