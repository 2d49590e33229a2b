"""Where stores keep their arenas: folders in a file system in memory."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

MEMORY = Path("/dev/shm")
ARENA = "arena-"
"""Before the id of the store's process."""
FRESH_S = 60.0
"""A folder without an arena may be that of a store that is starting."""


def cluster_folder(cluster_id: str) -> Path:
    """The same on each node, and no other cluster's."""
    return MEMORY / f"{_prefix()}{cluster_id}"


def node_folder(cluster: Path, node: str) -> Path:
    """A node's own: several of a cluster's nodes may be one machine. Short, because a socket's path is."""
    return cluster / node[:16]


def remove_stale() -> None:
    """Remove what this user's stores left that were killed together with their clusters."""
    for cluster in MEMORY.glob(f"{_prefix()}*"):
        arenas = list(cluster.glob(f"*/{ARENA}*"))
        try:
            is_fresh = time.time() - cluster.stat().st_mtime < FRESH_S
        except FileNotFoundError:
            continue
        if not any(_runs(arena.name.removeprefix(ARENA)) for arena in arenas) and (arenas or not is_fresh):
            shutil.rmtree(cluster, ignore_errors=True)


def _prefix() -> str:
    return f"holdfast-{os.getuid()}-"


def _runs(pid: str) -> bool:
    return pid.isdecimal() and Path("/proc", pid).exists()
