"""An upgrade of all workers: the first turn of each session afterwards, where KV migrates and where it cannot.

The floor is a turn of a session that nobody has moved. With other pages a worker takes no KV of the old layout, so
histories are computed again; with a KV store, the copies have the old layout too.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from typing import Any

import grpc

from benchmarks.common import save, serving
from benchmarks.kv_restart import Stub, turn
from cluster.cli.nodes import restart_all

SESSIONS, HISTORY = 32, 1024
START_TIMEOUT_S, DRAIN_TIMEOUT_S = 120.0, 5.0
UPGRADES: dict[str, dict[str, Any]] = {
    "the same layout": {"chunked_prefill_size": 256},
    "another page size": {"page_size": 4},
    "and back": {"page_size": 16},
}


async def round_of_turns(stub: Any, tokens: list[int] | None = None) -> tuple[float, int]:
    """One turn of each session, one after another: the first token's median milliseconds, and the tokens found."""
    times, found = list[float](), 0
    for number in range(SESSIONS):
        ms, cached = await turn(stub, number, tokens or [10 + (number * 7919 + i * 17) % 1900 for i in range(HISTORY)])
        times.append(ms)
        found += cached
    return statistics.median(times), found


async def measure() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    async with (
        serving(workers=2, max_total_tokens=2 * SESSIONS * HISTORY) as cluster,  # one worker has room for all
        grpc.aio.insecure_channel(cluster.grpc_url.removeprefix("grpc://")) as channel,
    ):
        stub, inputs = Stub(channel), itertools.count(5)
        await round_of_turns(stub)
        for name, changes in UPGRADES.items():
            stayed_ms, _ = await round_of_turns(stub, [next(inputs)] * 3)
            cluster.reconfigure(cluster.config.model_copy(update=changes))
            reports = await asyncio.to_thread(restart_all, cluster.url, None, START_TIMEOUT_S, DRAIN_TIMEOUT_S)
            ms, found = await round_of_turns(stub, [next(inputs)] * 3)
            rows[name] = {
                "sessions migrated": sum(report["sessions_migrated"] for report in reports),
                "a turn before, ms": round(stayed_ms, 1),
                "the first turn after, ms": round(ms, 1),
                "after over before": round(ms / stayed_ms, 2),
                "tokens found of each history": round(found / SESSIONS),
            }
    return {"what": f"{SESSIONS} sessions of {HISTORY} tokens; all of two workers are restarted", "upgrade to": rows}


if __name__ == "__main__":
    save("upgrade", asyncio.run(measure()))
