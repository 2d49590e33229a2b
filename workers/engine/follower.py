"""A follower rank: applies its leader's step log and computes its part of each batch. Decides nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from holdfast.v1 import rank_pb2
from workers.config import EngineConfig
from workers.engine.batch import Batch
from workers.engine.collectives import Collectives
from workers.engine.commands import call_in_thread
from workers.engine.rank import Rank
from workers.engine.step_log import LogReader

T = TypeVar("T")


class Follower:
    """One thread applies entries in the order in which they were ``push``ed.

    ``send_ack`` is called when an entry's operations are applied, before its batch is computed: the ack
    describes the state, and the batch is computed together with the other ranks. ``on_crash`` is called
    if an entry is refused (RankDiverged) or cannot be computed: the process must end then.
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
        """End after the entries pushed so far."""
        self._items.put(None)
        self._thread.join()

    def push(self, item: rank_pb2.Entry | Callable[[], None]) -> None:
        """An entry, or a command to run when all entries pushed before it are done."""
        self._items.put(item)

    def call(self, act: Callable[[], T]) -> Future[T]:
        """Run ``act`` in this rank's thread, between two steps. The future carries its HoldfastErrors."""
        return call_in_thread(act, self.push)

    def process(self, item: rank_pb2.Entry | Callable[[], None]) -> None:
        """Apply an entry or run a command. In this rank's thread."""
        if isinstance(item, rank_pb2.Entry):
            self.step(item)
        else:
            with self.rank.cache_lock:
                item()

    def _run(self) -> None:
        try:
            while (item := self._items.get()) is not None:
                self.process(item)
        except BaseException as error:
            self._on_crash(error)

    def step(self, entry: rank_pb2.Entry) -> None:
        """One iteration: apply -> ack -> compute."""
        with self.rank.cache_lock:
            self._send_ack(self.reader.apply(entry))
            self.rank.tell_pages()
            cache = self.rank.cache
            copies = list(cache.pending_copies)
            self.rank.update(copies, cache.take_table_updates())
        self.rank.launch(Batch.from_message(entry.batch), len(copies))
