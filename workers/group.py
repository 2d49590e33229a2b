"""How the ranks of a worker find each other, and what stands for one of them.

Every rank of an incarnation joins the same store (on rank 0's machine), forms the process group, and
leaves its gRPC address there; rank 0 reads the addresses and connects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from workers.collectives import Collectives, Shard
from workers.config import EngineConfig
from workers.rank import pick_device
from workers.rank_server import RankServer
from workers.server import WorkerServer


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place in one incarnation of a worker."""

    worker_id: str
    incarnation: int
    shard: Shard
    host: str
    """The address that this rank's servers listen on."""
    node: str = ""


def open_store(host: str, size: int, timeout_s: float) -> dist.TCPStore:
    """The store of a group, served by this process on a free port."""
    return dist.TCPStore(host, 0, size, True, timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(host: str, port: int, size: int, timeout_s: float) -> dist.TCPStore:
    """Another rank's end of the store."""
    return dist.TCPStore(host, port, size, False, timedelta(seconds=timeout_s), wait_for_workers=False)


async def start_rank(
    seat: Seat, config: EngineConfig, store: dist.Store | None, on_lost: Callable[[str], None]
) -> tuple[WorkerServer | RankServer, str]:
    """Load this rank's part and serve; returns the server and its address when the rank is ready.

    The leader is ready when it is connected to all others. ``store``: None if the rank is alone.
    """
    shard, identity = seat.shard, (seat.worker_id, seat.incarnation, config)
    group = None
    if store is not None:
        device = pick_device(config.device)
        # Not in the event loop: it waits for the other ranks.
        group = await asyncio.to_thread(
            Collectives, dist.PrefixStore("group", store), shard, device, seat.host, config.collective_timeout_s
        )
    if shard.rank > 0:
        assert store is not None and group is not None, "a follower has a leader"
        follower = RankServer(*identity, group, seat.node, on_lost)
        address = await follower.start(seat.host)
        await asyncio.to_thread(store.set, f"address/{shard.rank}", address)
        return follower, address
    leader = WorkerServer(*identity, on_lost, node=seat.node, group=group)

    def addresses() -> dict[int, str]:
        # Waits until each has loaded its part.
        ranks = range(1, shard.size)
        return {rank: store.get(f"address/{rank}").decode() for rank in ranks} if store is not None else {}

    return leader, await leader.start(seat.host, addresses)
