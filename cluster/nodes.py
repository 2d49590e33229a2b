"""A machine of the cluster: its Ray node, and what happens when it is told to go."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast.cluster")
STOP_TIMEOUT_S = 10.0


def prepare_environment() -> None:
    """Set what a Ray node reads from the environment when it starts, unless the user has.

    Ray gives its workers a niceness of 15: whatever else computes on the machine would starve ranks and
    routers, and who does not run within a lease is taken for dead.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray warns that it will stop hiding GPUs from actors that ask for none; the new way is wanted.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def workers_on(workers: list[dict[str, Any]], node: str) -> list[str]:
    """Of those that the router lists, the names of the ones with a rank on a node.

    ``node``: its address, or its id (or the beginning of it) as ``holdfast status`` shows it.
    """

    def is_on(place: str) -> bool:
        address, _, node_id = place.partition("/")
        return bool(place) and (address == node or (node_id != "" and node.startswith(node_id)))

    return [worker["worker_id"] for worker in workers if any(is_on(rank["node"]) for rank in worker["ranks"])]


def serve_node(address: str, ray_options: list[str], drain: Callable[[str], None]) -> int:
    """Run a Ray node in the foreground; at SIGTERM or SIGINT, ``drain`` it, given its id, and stop it.

    Returns the node's exit code: 0 if it was told to go.
    """
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--address={address}", *ray_options]
    prepare_environment()
    told: list[int] = []
    # A session of its own: what the terminal or the service manager sends is for us first.
    process = subprocess.Popen(command, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: told.append(number))
    while process.poll() is None and not told:
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    if process.poll() is not None:
        return process.returncode or 1
    try:
        drain(_node_id(process.pid))
    except HoldfastError as error:
        log.error("the node leaves undrained: %s", error.message)
    finally:
        _stop(process)
    return 0


def _stop(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    # Ray takes no more work here then, and waits for what runs: that is drained, and starts elsewhere.
    ranks = [child for child in children if child.is_running() and child.name().startswith("ray::RankActor")]
    for child in ranks:
        child.kill()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for child in [*children, psutil.Process(process.pid)]:
            if child.is_running():
                child.kill()
        process.wait()


def _node_id(pid: int) -> str:
    """Of the Ray node that this process started: its raylet was told."""
    for child in psutil.Process(pid).children(recursive=True):
        for word in child.cmdline():
            if word.startswith("--node_id="):
                return word.removeprefix("--node_id=")
    raise HoldfastError("the Ray node has not started yet")
