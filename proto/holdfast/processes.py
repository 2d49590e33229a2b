"""Processes of the cluster's nodes, as whoever ends them must know them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class NodeProcess:
    """A process and its Ray node. ``created``: the process's start time, because pids are reused."""

    pid: int
    created: float
    node_id: str

    @classmethod
    def this(cls, node_id: str) -> NodeProcess:
        """The calling process."""
        return cls(os.getpid(), psutil.Process().create_time(), node_id)
