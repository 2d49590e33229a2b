"""The KV core alone: microseconds of one turn's bookkeeping, by history, page size and KV groups."""

from __future__ import annotations

import statistics
import time

from benchmarks.common import save
from workers.kv import GroupSpec, Outcome, SessionCache, full_group, window_group
from workers.kv.slot import new_tokens

HISTORIES = (1024, 8192, 32768)
PAGE_SIZES = (1, 16)
WINDOWS = (128, 1024)
"""Of the second and third group: gpt-oss has a full and a window group, no model there is more."""
REPEATS = 400


def groups_of(num_groups: int, num_pages: int) -> list[GroupSpec]:
    """One full group, and windows."""
    return [full_group(num_pages), *(window_group(num_pages, window) for window in WINDOWS)][:num_groups]


def turn_us(history_len: int, page_size: int, num_groups: int) -> float:
    """Median of resume + free_tail + extend(16) + commit + finish, with ``history_len`` tokens before."""
    cache = SessionCache(groups_of(num_groups, 2 * history_len // page_size + 64), page_size)
    cache.open("s")
    history = new_tokens([i % 1000 for i in range(history_len)])
    cache.resume("s", "fill", history, 0)
    cache.extend("s", history_len)
    cache.commit({"s": history})
    cache.finish("s", "fill", Outcome.COMPLETED)
    delta = new_tokens(range(2000, 2016))
    whole = history + delta
    times = []
    for i in range(REPEATS):
        # Cut what the previous repeat added, as a rewind does, so that the history keeps its length.
        began = time.perf_counter_ns()
        cache.free_tail("s", history_len)
        cache.resume("s", str(i), whole, history_len, match_prefix=False)
        cache.extend("s", 16)
        cache.commit({"s": delta})
        cache.finish("s", str(i), Outcome.COMPLETED)
        times.append((time.perf_counter_ns() - began) / 1000)
        cache.take_table_updates()
    return statistics.median(times)


def main() -> None:
    rows = {
        f"page {page_size}, {n} group{'s' * (n > 1)}": {
            f"{length} tokens": round(turn_us(length, page_size, n), 1) for length in HISTORIES
        }
        for page_size in PAGE_SIZES
        for n in (1, 2, 3)
    }
    growth = {
        name: round(row[f"{HISTORIES[-1]} tokens"] / row[f"{HISTORIES[0]} tokens"], 2) for name, row in rows.items()
    }
    save("kv_core", {"microseconds of a turn": rows, "longest history over shortest": growth})


if __name__ == "__main__":
    main()
