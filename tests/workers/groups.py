"""A tensor-parallel group in this process: a thread for each rank, real gloo, the step log by function call."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch.distributed as dist

from holdfast.v1 import rank_pb2
from tests.workers.engine import SMALL, Engine
from workers.config import EngineConfig
from workers.engine.collectives import Collectives
from workers.engine.follower import Follower
from workers.engine.leader import Leader
from workers.engine.rank import pick_device
from workers.models.parallel import Shard


class GroupEngine(Engine):
    """As ``Engine``, over ``size`` ranks. The leader is stepped by the test, the followers follow.

    ``refused``: per rank, the entry that it refused and why. Entries pass through ``send``, as bytes.
    """

    def __init__(self, size: int, config: EngineConfig = SMALL, *, incarnation: int = 7, **changes: object) -> None:
        self.config = replace(config, collective_timeout_s=10.0, num_threads=1, **changes)  # type: ignore[arg-type]
        self.size, self.incarnation = size, incarnation
        self.updates = {}
        self.followers: dict[int, Follower] = {}
        self.refused: dict[int, tuple[int, str]] = {}
        self.sent = 0
        store = dist.HashStore()
        threads = [threading.Thread(target=self._make_follower, args=(rank, store)) for rank in range(1, size)]
        for thread in threads:
            thread.start()
        group = self._collectives(0, store)
        self.leader = Leader(self.config, self._take, self._crash, incarnation=incarnation, group=group, send=self.send)
        for thread in threads:
            thread.join()
        self.cache, self.scheduler = self.leader.cache, self.leader.scheduler
        for follower in self.followers.values():
            follower.start()

    def _collectives(self, rank: int, store: dist.Store) -> Collectives:
        return Collectives(store, Shard(rank, self.size), pick_device("cpu"), "127.0.0.1", 10.0)

    def _make_follower(self, rank: int, store: dist.Store) -> None:
        def refuse(error: BaseException) -> None:
            self.refused[rank] = (follower.reader.last_index + 1, str(error))

        group = self._collectives(rank, store)
        follower = Follower(self.config, group, self.incarnation, lambda ack: self.leader.log.ack(rank, ack), refuse)
        self.followers[rank] = follower

    def send(self, entry: rank_pb2.Entry) -> None:
        self.sent += 1
        for follower in self.followers.values():
            follower.push(rank_pb2.Entry.FromString(entry.SerializeToString()))

    def run(self, max_steps: int = 2000) -> None:
        super().run(max_steps)
        # What was done after the last batch goes out too, and everything is acked.
        self.leader.step()
        self.settle()

    def settle(self) -> None:
        for follower in self.followers.values():
            follower.stop()
            follower._thread = threading.Thread(target=follower._run, daemon=True)
            follower.start()
        if not self.refused:
            assert set(self.leader.log.acked.values()) == {self.leader.log.last_index}, "every entry is acked"

    def stop(self) -> None:
        for follower in self.followers.values():
            follower.stop()
