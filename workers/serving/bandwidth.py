"""How fast KV arrives, against how fast its tokens are computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from holdfast.errors import MigrationRefused
from workers.engine.leader import Leader
from workers.engine.migration import PendingImport

WEIGHT_OF_LAST = 0.5
"""Weight of the last measurement in the expected bandwidth."""
REMEASURE_EVERY = 16
"""One in this many that look slower than computing is made anyway, to measure again."""


class SharedTime:
    """What transfers take that share their way: of the time that n are under way, each is charged an n-th.

    So what comes at once is as fast as what comes one after another (the virtual time of fair queueing: Demers, Keshav,
    Shenker, "Analysis and simulation of a fair queueing algorithm", SIGCOMM 1989).
    """

    def __init__(self) -> None:
        self._num_transfers, self._at, self._virtual_s = 0, 0.0, 0.0

    @contextmanager
    def transfer(self) -> Iterator[Callable[[], float]]:
        """One is under way meanwhile. Yields what tells the seconds that it was charged so far."""
        began = self._now(1)
        try:
            yield lambda: self._now(0) - began
        finally:
            self._now(-1)

    def _now(self, change: int) -> float:
        at = time.monotonic()
        if self._num_transfers:
            self._virtual_s += (at - self._at) / self._num_transfers
        self._at, self._num_transfers = at, self._num_transfers + change
        return self._virtual_s


class Bandwidth:
    """Of one way on which KV comes to a worker."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self.time = SharedTime()
        self._bytes_per_s: float | None = None
        self._num_refused = 0

    def refuse_slow(self, pending: PendingImport) -> None:
        """Raises MigrationRefused if computing is expected to take less time."""
        speed, bandwidth, rank = self._leader.pace.prefill_tokens_per_s, self._bytes_per_s, self._leader.rank
        if not speed or not bandwidth:
            return
        sizes = zip(pending.columns, rank.kv.page_bytes, strict=True)
        num_bytes = sum(len(part) * page_bytes for part, page_bytes in sizes) * rank.shard.size
        compute_s = (pending.committed_len - pending.cached_len) / speed
        if num_bytes / bandwidth > compute_s:
            self._num_refused += 1
            if self._num_refused % REMEASURE_EVERY:
                raise MigrationRefused(f"computing takes {compute_s:.3f} s, a transfer {num_bytes / bandwidth:.3f} s")

    def seconds(self, num_bytes: int) -> float:
        """How long so much is expected to take; 0 before the first measurement."""
        return num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0

    def measured(self, num_bytes: int, seconds: float) -> None:
        """So much came in this time, of what ``time`` charges."""
        if num_bytes and seconds:
            speed = num_bytes / seconds
            self._bytes_per_s = WEIGHT_OF_LAST * speed + (1 - WEIGHT_OF_LAST) * (self._bytes_per_s or speed)
