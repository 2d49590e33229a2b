"""A rank that follows: plays its leader's step log and computes its part of each batch. Decides nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from holdfast.tokens import unpack_tokens
from holdfast.v1 import rank_pb2
from workers.collectives import Collectives
from workers.commands import on_thread
from workers.config import EngineConfig
from workers.rank import Batch, Rank
from workers.step_log import LogReader

T = TypeVar("T")


class Follower:
    """One thread plays entries, in the order they were ``push``ed.

    ``send_ack`` is called when an entry's operations are applied, before its batch is computed: an ack
    speaks of the state, and the batch can only be computed together. ``on_crash`` is called if an entry
    is refused (RankDiverged) or cannot be computed: then the process must go.
    """

    def __init__(
        self,
        config: EngineConfig,
        group: Collectives,
        incarnation: int,
        send_ack: Callable[[rank_pb2.Ack], None],
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self.rank = Rank(config, group)
        self.reader = LogReader(self.rank.cache, incarnation)
        self._send_ack = send_ack
        self._on_crash = on_crash
        self._items: queue.SimpleQueue[rank_pb2.Entry | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holdfast-follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the entries that were pushed."""
        self._items.put(None)
        self._thread.join()

    def push(self, item: rank_pb2.Entry | Callable[[], None]) -> None:
        """An entry; or a command, to run when all entries pushed before it are done."""
        self._items.put(item)

    def call(self, act: Callable[[], T]) -> Future[T]:
        """``act()``, in this rank's thread, between two steps. HoldfastErrors come through the future."""
        return on_thread(act, self.push)

    def take(self, item: rank_pb2.Entry | Callable[[], None]) -> None:
        """In this rank's thread: do what was pushed."""
        if isinstance(item, rank_pb2.Entry):
            self.step(item)
        else:
            item()

    def _run(self) -> None:
        try:
            while (item := self._items.get()) is not None:
                self.take(item)
        except BaseException as error:
            self._on_crash(error)

    def step(self, entry: rank_pb2.Entry) -> None:
        """One turn of the loop: play -> ack -> compute."""
        self._send_ack(self.reader.play(entry))
        cache, batch = self.rank.cache, entry.batch
        self.rank.compute(
            Batch(
                unpack_tokens(batch.rows).tolist(),
                unpack_tokens(batch.starts).tolist(),
                unpack_tokens(batch.counts).tolist(),
                unpack_tokens(batch.tokens),
                unpack_tokens(batch.logit_rows).tolist(),
            ),
            list(cache.pending_copies),
            cache.take_table_updates(),
        )
