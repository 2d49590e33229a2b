"""How the ranks of a worker find each other and start.

Every rank of an incarnation joins the same store (on rank 0's machine), joins the process group, and
writes its gRPC address to the store. Rank 0 reads the addresses and connects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from workers.config import EngineConfig
from workers.engine.collectives import Collectives
from workers.engine.rank import pick_device
from workers.models.parallel import Shard
from workers.serving.rank_server import RankServer
from workers.serving.worker_server import WorkerServer


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Which rank of which incarnation of which worker this is, and where."""

    worker_id: str
    incarnation: int
    shard: Shard
    host: str
    """The address on which this rank's servers listen."""
    node: str = ""
    lifeline: str = ""
    """See ``holdfast.lifeline``; empty: none."""


def open_store(host: str, size: int, timeout_s: float) -> dist.TCPStore:
    """A group's store, served by this process on a free port."""
    return dist.TCPStore(host, 0, size, True, timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(host: str, port: int, size: int, timeout_s: float) -> dist.TCPStore:
    """Another rank's end of the store."""
    return dist.TCPStore(host, port, size, False, timedelta(seconds=timeout_s), wait_for_workers=False)


async def start_rank(
    rank: RankIdentity, config: EngineConfig, store: dist.Store | None, on_lost: Callable[[str], None]
) -> tuple[WorkerServer | RankServer, str]:
    """Load this rank's shard and serve. Returns the server and its address when the rank is ready.

    The leader is ready when it is connected to all followers. ``store``: None for a single rank.
    """
    shard, identity = rank.shard, (rank.worker_id, rank.incarnation, config)
    group = None
    if store is not None:
        device = pick_device(config.device)
        # In a thread, because it waits for the other ranks.
        group = await asyncio.to_thread(
            Collectives, dist.PrefixStore("group", store), shard, device, rank.host, config.collective_timeout_s
        )
    if shard.rank > 0:
        assert store is not None and group is not None, "a follower belongs to a group"
        follower = RankServer(*identity, group, rank.node, on_lost)
        address = await follower.start(rank.host)
        await asyncio.to_thread(store.set, f"lifeline/{shard.rank}", rank.lifeline)
        await asyncio.to_thread(store.set, f"address/{shard.rank}", address)
        return follower, address
    leader = WorkerServer(*identity, on_lost, node=rank.node, group=group)

    def of_followers(what: str) -> dict[int, str]:
        # Waits until each follower has loaded its shard.
        followers = range(1, shard.size)
        return {i: store.get(f"{what}/{i}").decode() for i in followers} if store is not None else {}

    def lifelines() -> list[str]:
        return [each for each in (rank.lifeline, *of_followers("lifeline").values()) if each]

    return leader, await leader.start(rank.host, partial(of_followers, "address"), lifelines)
