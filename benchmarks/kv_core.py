"""The KV core alone: microseconds of one turn's bookkeeping, by the length of its history."""

from __future__ import annotations

import statistics
import time

from benchmarks.common import save
from workers.kv import Outcome, SessionCache
from workers.kv.slot import new_tokens

HISTORIES = (1024, 8192, 32768)
PAGE_SIZES = (1, 16)
REPEATS = 400


def turn_us(history_len: int, page_size: int) -> float:
    """Median of resume + free_tail + extend(16) + commit + finish, with ``history_len`` tokens before."""
    cache = SessionCache(2 * history_len // page_size + 64, page_size)
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
        f"page {page_size}": {f"{length} tokens": round(turn_us(length, page_size), 1) for length in HISTORIES}
        for page_size in PAGE_SIZES
    }
    growth = {
        name: round(row[f"{HISTORIES[-1]} tokens"] / row[f"{HISTORIES[0]} tokens"], 2) for name, row in rows.items()
    }
    save("kv_core", {"microseconds of a turn": rows, "longest history over shortest": growth})


if __name__ == "__main__":
    main()
