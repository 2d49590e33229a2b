"""The KV core alone: microseconds of one turn's bookkeeping, by history, page size and KV groups."""

from __future__ import annotations

import statistics
import time
from array import array
from dataclasses import dataclass, field

from benchmarks.common import save
from workers.kv import GroupSpec, Outcome, SessionCache, full_group, window_group
from workers.kv.slot import new_tokens

HISTORIES = (1024, 8192, 32768)
PAGE_SIZES = (1, 16)
NUM_GROUPS = (1, 2, 3)
WINDOWS = (128, 1024)
"""Of the second and third group: gpt-oss has a full and a window group, no model there is more."""
REPEATS = 1000


def groups_of(num_groups: int, num_pages: int) -> list[GroupSpec]:
    """One full group, and windows."""
    return [full_group(num_pages), *(window_group(num_pages, window) for window in WINDOWS)][:num_groups]


@dataclass
class Session:
    """A cache with one session of ``history``, whose next turn is taken again and again."""

    cache: SessionCache
    history: array[int]
    delta: array[int] = field(default_factory=lambda: new_tokens(range(2000, 2016)))
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.whole = self.history + self.delta

    @classmethod
    def of(cls, history_len: int, page_size: int, num_groups: int) -> Session:
        """After its first turn, which computed the history."""
        cache = SessionCache(groups_of(num_groups, 2 * history_len // page_size + 64), page_size)
        history = new_tokens([i % 1000 for i in range(history_len)])
        cache.open("s")
        cache.resume("s", "fill", history, 0)
        cache.extend("s", history_len)
        cache.commit({"s": history})
        cache.finish("s", "fill", Outcome.COMPLETED)
        return cls(cache, history)

    def take_turn(self, turn_id: str) -> None:
        """Time resume + free_tail + extend(16) + commit + finish."""
        cache, delta, history_len = self.cache, self.delta, len(self.history)
        # Cut what the previous turn added, as a rewind does, so that the history keeps its length.
        began = time.perf_counter_ns()
        cache.free_tail("s", history_len)
        cache.resume("s", turn_id, self.whole, history_len, match_prefix=False)
        cache.extend("s", 16)
        cache.commit({"s": delta})
        cache.finish("s", turn_id, Outcome.COMPLETED)
        self.times.append((time.perf_counter_ns() - began) / 1000)
        cache.take_table_updates()


def turn_us(history_len: int, page_size: int) -> dict[int, float]:
    """Median microseconds of a turn by the number of groups, which take turns so that all see the same machine."""
    sessions = {n: Session.of(history_len, page_size, n) for n in NUM_GROUPS}
    for i in range(REPEATS):
        for session in sessions.values():
            session.take_turn(str(i))
    return {n: round(statistics.median(session.times), 1) for n, session in sessions.items()}


def main() -> None:
    turns = {(page_size, length): turn_us(length, page_size) for page_size in PAGE_SIZES for length in HISTORIES}
    rows = {
        f"page {page_size}, {n} group{'s' * (n > 1)}": {
            f"{length} tokens": turns[page_size, length][n] for length in HISTORIES
        }
        for page_size in PAGE_SIZES
        for n in NUM_GROUPS
    }
    over_one = {
        f"page {page_size}, {n} groups": {
            f"{length} tokens": round(turns[page_size, length][n] / turns[page_size, length][1], 2)
            for length in HISTORIES
        }
        for page_size in PAGE_SIZES
        for n in NUM_GROUPS[1:]
    }
    growth = {
        name: round(row[f"{HISTORIES[-1]} tokens"] / row[f"{HISTORIES[0]} tokens"], 2) for name, row in rows.items()
    }
    save(
        "kv_core",
        {"microseconds of a turn": rows, "over one group": over_one, "longest history over shortest": growth},
    )


if __name__ == "__main__":
    main()
