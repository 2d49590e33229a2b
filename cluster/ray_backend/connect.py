"""Joins a Ray cluster, or starts one on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import Any

import psutil
import ray

from cluster.config import Config
from cluster.ray_backend import listeners, local_node
from cluster.ray_backend.nodes import prepare_environment
from cluster.ray_backend.processes import END_TIMEOUT_S
from holdfast.errors import ConfigError, HoldfastError

log = logging.getLogger("holdfast.cluster")
NAMESPACE = "holdfast"
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""The object store carries only addresses and settings: tokens go over gRPC."""
CONNECT_TIMEOUT_S = 5.0
STARTS = 8
"""Each takes 30 s or more when it fails: on a machine that is busy for minutes, one must outlast that."""
TOO_SLOW = "timed out during startup"


def connect(config: Config) -> None:
    """Join the Ray cluster at ``config.address``, or start one on this machine. Raises ConfigError, HoldfastError."""
    prepare_environment()
    listeners.install()
    common: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": logging.ERROR, "log_to_driver": True}
    if config.log_format == "json":
        logging.getLogger().handlers.clear()  # Ray's takes their place
        common["logging_config"] = ray.LoggingConfig(encoding="JSON", additional_log_standard_attrs=["name"])
    if config.address is not None:
        _join(config.address, common)
        return
    _start(
        # Without it, Ray would join any cluster that it finds on this machine.
        address="local",
        # Logical CPUs: one for each rank, however many cores there are.
        num_cpus=config.workers * config.tp,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address=LOOPBACK,
        **common,
    )
    num_gpus, num_ranks = int(ray.cluster_resources().get("GPU", 0)), config.workers * config.tp
    if config.device == "cuda" and num_gpus < num_ranks:
        ray.shutdown()
        raise ConfigError(f"device: cuda needs a GPU for each of {num_ranks} ranks; this machine has {num_gpus}")


def _start(**settings: Any) -> None:
    """Start a Ray node. Raises HoldfastError.

    One that is not there within Ray's 30 s, as on a busy machine, is started again.
    """
    this = psutil.Process()
    before = set(this.children(recursive=True))
    for attempt in range(1, STARTS + 1):
        try:
            with local_node.started_by_init():
                ray.init(**settings)
            return
        except Exception as error:  # Ray raises nothing narrower
            ended = [process for process in this.children(recursive=True) if process not in before]
            for process in ended:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(ended, timeout=END_TIMEOUT_S)
            if attempt == STARTS or TOO_SLOW not in str(error):
                raise HoldfastError(f"Ray does not start on this machine: {error}") from error
            log.warning("Ray has not started within 30 s; starting it again")


def _join(address: str, common: dict[str, Any]) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"address: {address} is not HOST:PORT")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"address: no Ray cluster answers at {address}: {error}") from None
    if host in (LOOPBACK, "localhost"):
        # Otherwise Ray looks for the cluster at this machine's outward address.
        common["_node_ip_address"] = LOOPBACK
    try:
        ray.init(address=address, **common)
    except ConnectionError as error:
        hint = "" if os.environ.get("RAY_AUTH_MODE") == "token" else "; if it asks for a token, set RAY_AUTH_MODE=token"
        raise ConfigError(f"address: the Ray cluster at {address} refuses to connect{hint}: {error}") from None
