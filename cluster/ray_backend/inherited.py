"""What a generation of a cluster leaves to the next one, which runs on a Ray node of its own on the same machine.

No name, node or placement of Ray connects the two: the next generation knows processes by their numbers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import psutil

from cluster.ray_backend.processes import end_process, runs
from holdfast.processes import NodeProcess
from router.fleet.link import WorkerAddress


@dataclass(frozen=True, slots=True)
class Inherited:
    """A worker of the generation before. ``has_room``: whether its successor can start beside it, which takes a GPU's
    memory twice.
    """

    address: WorkerAddress
    ranks: tuple[NodeProcess, ...]
    has_room: bool

    @property
    def name(self) -> str:
        return self.address.worker_id

    def runs(self) -> bool:
        return all(_runs(rank) for rank in self.ranks)

    async def end(self) -> None:
        for rank in self.ranks:
            if _runs(rank):
                psutil.Process(rank.pid).kill()  # its sessions are elsewhere: it has nothing to do at its end
            await asyncio.to_thread(end_process, rank.pid, rank.created)


def _runs(process: NodeProcess) -> bool:
    try:
        found = psutil.Process(process.pid)
        return bool(found.create_time() == process.created) and runs(found)
    except psutil.NoSuchProcess:
        return False
