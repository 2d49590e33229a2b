"""A machine of the cluster: its Ray node, which is drained before it leaves."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from holdfast.errors import HoldfastError

log = logging.getLogger("holdfast.cluster")
STOP_TIMEOUT_S = 10.0
GCS_ABSENCE_S = 7 * 24 * 3600
"""How long a node's processes go on without the GCS."""
STORAGE_PATH = "RAY_gcs_storage_path"
STORAGE_VARIABLES = ("RAY_gcs_storage", STORAGE_PATH, "RAY_REDIS_ADDRESS")
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
TOKEN_FILE = Path(".ray") / "auth_token"


def prepare_environment() -> None:
    """Set the environment variables that a Ray node reads at its start, unless the user has set them.

    Call this before ``ray`` is imported. Ray starts its workers with a niceness of 15. Any other computation on the
    machine would then starve ranks and routers, and their leases would expire.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Without it, all of a node's processes end when Ray's GCS is gone for a minute: turns do not need it.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(GCS_ABSENCE_S))
    # Opt in to Ray's coming default of not hiding GPUs from actors without any; it warns otherwise.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Without it, a call of Ray's that comes after `ray.shutdown` joins any cluster on this machine, or starts one.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")


@contextlib.contextmanager
def gcs_storage() -> Iterator[Path | None]:
    """Yields a folder for the state of GCSs; None where the user chose a storage, and the GCS is their affair."""
    if any(name in os.environ for name in STORAGE_VARIABLES):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-gcs-", ignore_cleanup_errors=True) as folder:
        locked = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        # systemd-tmpfiles(8) removes what is ten days old in /tmp, except in a folder that is locked.
        fcntl.flock(locked, fcntl.LOCK_SH)
        try:
            yield Path(folder)
        finally:
            os.close(locked)


def keep_gcs_state(storage: Path) -> None:
    """Have a GCS that is started after this keep its state on the disk, and know of none before it.

    Ray's embedded storage (RocksDB, REP-64; alpha in Ray 2.60) needs no Redis.
    """
    storage.mkdir(exist_ok=True)  # it may have been lost with what it had
    os.environ |= {"RAY_gcs_storage": "rocksdb", STORAGE_PATH: tempfile.mkdtemp(dir=storage)}


def use_token() -> None:
    """Use Ray's authentication token if this machine has one, as ``ray start`` does, unless the user decided.

    A cluster without authentication ignores the token. Call this before ``ray`` is imported: Ray reads the
    variable then.
    """
    found = any(name in os.environ for name in TOKEN_VARIABLES) or (Path.home() / TOKEN_FILE).is_file()
    if found:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def workers_on(workers: list[dict[str, Any]], node: str) -> list[str]:
    """The names of the workers that have a rank on a node.

    ``node``: its address, or (the beginning of) its id, as in ``holdfast status``.
    """

    def is_on(place: str) -> bool:
        address, _, node_id = place.partition("/")
        return bool(place) and (address == node or (node_id != "" and node.startswith(node_id)))

    return [worker["worker_id"] for worker in workers if any(is_on(rank["node"]) for rank in worker["ranks"])]


def serve_node(address: str, ray_options: list[str], drain: Callable[[str], None]) -> int:
    """Run a Ray node in the foreground. On SIGTERM or SIGINT, call ``drain`` with its id, then stop it.

    Returns the exit code: 0 after a signal, else the node's own.
    """
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", f"--address={address}", *ray_options]
    prepare_environment()
    signals: list[int] = []
    # In a session of its own: signals to the process group must not reach Ray before the drain.
    process = subprocess.Popen(command, start_new_session=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    while process.poll() is None and not signals:
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    if process.poll() is not None:
        return process.returncode or 1
    try:
        drain(_node_id(process.pid))
    except HoldfastError as error:
        log.error("the node leaves without a drain: %s", error.message)
    finally:
        _stop(process)
    return 0


def _stop(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    # Ray now waits for running actors. The node's ranks are drained, so end them.
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
    """The id of the Ray node that this process started, from its raylet's command line."""
    for child in psutil.Process(pid).children(recursive=True):
        for word in child.cmdline():
            if word.startswith("--node_id="):
                return str(word).removeprefix("--node_id=")
    raise HoldfastError("the Ray node has not started yet")
