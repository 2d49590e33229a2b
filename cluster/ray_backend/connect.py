"""Joins a Ray cluster, or starts one on this machine."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

import ray

from cluster.config import Config
from cluster.ray_backend.nodes import prepare_environment
from holdfast.errors import ConfigError

NAMESPACE = "holdfast"
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 128 * 1024 * 1024
"""The object store carries only addresses and settings: tokens go over gRPC."""
CONNECT_TIMEOUT_S = 5.0


def connect(config: Config) -> None:
    """Join the Ray cluster at ``config.address``, or start one on this machine. Raises ConfigError."""
    prepare_environment()
    common: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": logging.ERROR, "log_to_driver": True}
    if config.log_format == "json":
        logging.getLogger().handlers.clear()  # Ray's takes their place
        common["logging_config"] = ray.LoggingConfig(encoding="JSON", additional_log_standard_attrs=["name"])
    if config.address is not None:
        _join(config.address, common)
        return
    ray.init(
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
