"""Which worker runs a session's turns: cached prefix weighed against load. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

CHUNK_TOKENS = 64
"""Granularity of remembered prefixes: coarse enough to be small, fine enough to be useful."""
MAX_CHUNKS = 65_536
"""About 10 MB; the least recently used are evicted first."""
MAX_PREFIX_CHUNKS = 64
"""The first 4096 tokens: sessions share what comes first, and the cost of a turn must not grow with its length."""
MAX_KEYS = 16_384
TURN_COST_TOKENS = 256
"""The cost of one live turn on a worker to a new one, in prefill tokens: they share the worker's steps."""

COPIED_COST = 0.1
"""The cost of a token whose KV the worker's node has a copy of, in prefill tokens: it is loaded."""

MIN_IMBALANCE, MAX_IMBALANCE = 4, 0.25
"""Workers are balanced while their session counts differ by at most this number, or this share of the larger
one. The tolerance keeps sessions from moving back and forth."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What placement knows of a worker: ``name`` is ``worker_id@incarnation``."""

    name: str
    live_turns: int
    sessions: int
    max_turns: int


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Migrate ``count`` sessions from ``source`` to ``target``."""

    source: str
    target: str
    count: int


def plan_rebalance(workers: list[WorkerView]) -> Rebalance | None:
    """The migration from the worker with most sessions to the one with fewest; None if they are balanced."""
    if len(workers) < 2:
        return None
    most = max(workers, key=lambda worker: (worker.sessions, worker.name))
    least = min(workers, key=lambda worker: (worker.sessions, worker.name))
    difference = most.sessions - least.sessions
    if difference <= max(MIN_IMBALANCE, MAX_IMBALANCE * most.sessions):
        return None
    return Rebalance(most.name, least.name, difference // 2)


class Placement:
    """Chooses workers, by the prefixes that it remembers of each."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[bytes, OrderedDict[str, None]] = OrderedDict()
        self._keys: OrderedDict[str, str] = OrderedDict()

    def choose(
        self,
        workers: list[WorkerView],
        scope: str,
        tokens: array[int],
        cache_key: str = "",
        copied_near: Collection[str] = (),
    ) -> str | None:
        """The worker on which the turn should start soonest; None if there are no workers.

        ``scope``: whose prefixes it shares. ``copied_near``: the workers on whose nodes there are copies of the turn's
        KV. Turns with the same ``cache_key`` (OpenAI's ``prompt_cache_key``) go to the same worker while it has room.
        """
        if not workers:
            return None
        by_name = {worker.name: worker for worker in workers}
        wanted = self._keys.get(f"{scope}/{cache_key}") if cache_key else None
        if wanted in by_name and by_name[wanted].live_turns < by_name[wanted].max_turns:
            return wanted
        cached = self._cached_tokens(scope, tokens)

        def cost(worker: WorkerView) -> tuple[float, int, str]:
            compute = (len(tokens) - cached.get(worker.name, 0)) * (COPIED_COST if worker.name in copied_near else 1.0)
            return compute + TURN_COST_TOKENS * worker.live_turns, worker.sessions, worker.name

        return min(workers, key=cost).name

    def remember(self, worker: str, scope: str, tokens: array[int], cache_key: str = "") -> None:
        """``worker`` has computed ``tokens``."""
        for digest in _chunk_digests(scope, tokens):
            holders = self._chunks.setdefault(digest, OrderedDict())
            holders[worker] = None
            self._chunks.move_to_end(digest)
        while len(self._chunks) > MAX_CHUNKS:
            self._chunks.popitem(last=False)
        if cache_key:
            self._keys[f"{scope}/{cache_key}"] = worker
            self._keys.move_to_end(f"{scope}/{cache_key}")
            if len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)

    def forget(self, worker: str) -> None:
        """Forget a lost worker's prefixes."""
        for digest in [d for d, holders in self._chunks.items() if holders.pop(worker, 0) is None and not holders]:
            del self._chunks[digest]
        for key in [key for key, name in self._keys.items() if name == worker]:
            del self._keys[key]

    def _cached_tokens(self, scope: str, tokens: array[int]) -> dict[str, int]:
        found: dict[str, int] = {}
        for i, digest in enumerate(_chunk_digests(scope, tokens)):
            holders = self._chunks.get(digest)
            if not holders:
                break
            for name in holders:
                if found.get(name, 0) == i * CHUNK_TOKENS:
                    found[name] = (i + 1) * CHUNK_TOKENS
        return found


def _chunk_digests(scope: str, tokens: array[int]) -> list[bytes]:
    digests, digest = [], hashlib.blake2b(scope.encode(), digest_size=16).digest()
    end = min(len(tokens), MAX_PREFIX_CHUNKS * CHUNK_TOKENS)
    for start in range(0, end - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS].tobytes()
        digest = hashlib.blake2b(digest + chunk, digest_size=16).digest()
        digests.append(digest)
    return digests
