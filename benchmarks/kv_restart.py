"""A cluster is started again with 1,000 sessions in its journal: what the first turn of each finds on disk."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx

from benchmarks.common import save, serving
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc

SESSIONS, HISTORY, AT_ONCE = 1000, 256, 16
MEMORY_GB, DISK_GB = 0.2, 2.0
Stub = session_pb2_grpc.SessionServiceStub


@asynccontextmanager
async def started(folder: Path, disk: Path | None) -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """A cluster over that journal and that disk."""
    settings: dict[str, Any] = {"workers": 1, "max_total_tokens": 32_768}
    if disk is not None:
        settings |= {"hicache_size": MEMORY_GB, "kv_disk_path": disk, "kv_disk_size": DISK_GB}
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(serving(folder, **settings))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=cluster.url, timeout=60))
        address = cluster.grpc_url.removeprefix("grpc://")
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        yield Stub(channel), http


async def turn(stub: Any, number: int, tokens: list[int]) -> tuple[float, int]:
    """First token's milliseconds, and how many tokens were found."""
    sampling = pb.Sampling(max_tokens=1, temperature=0, ignore_eos=True)
    request = pb.GenerateRequest(session_id=f"s{number}", tokens=pb.TokenIds(ids=tokens), sampling=sampling)
    began, cached = time.perf_counter(), 0
    async for answer in stub.Generate(request):
        cached = answer.cached_tokens
    return 1000 * (time.perf_counter() - began), cached


async def turns(stub: Any, tokens: Any) -> list[tuple[float, int]]:
    """One of each session, some at once."""
    found: list[tuple[float, int]] = []
    for first in range(0, SESSIONS, AT_ONCE):
        numbers = range(first, min(SESSIONS, first + AT_ONCE))
        found += await asyncio.gather(*(turn(stub, number, tokens(number)) for number in numbers))
    return found


async def on_disk(http: httpx.AsyncClient, count: int) -> None:
    while True:
        (worker,) = (await http.get("/holdfast/workers")).json()
        if int(worker["kv_store"]["counters"].get("disk_stored", 0)) >= count:
            return
        await asyncio.sleep(0.2)


async def restarted(folder: Path, disk: Path | None) -> list[tuple[float, int]]:
    async with started(folder, disk) as (stub, http):
        await turns(stub, lambda number: [10 + (number * 7919 + i * 17) % 1900 for i in range(HISTORY)])
        if disk is not None:
            await on_disk(http, SESSIONS * (HISTORY // 16))
    async with started(folder, disk) as (stub, _):
        return await turns(stub, lambda number: [5, 6, 7])


async def measure() -> dict[str, Any]:
    figures: dict[str, Any] = {"what": f"first turns of {SESSIONS} sessions of {HISTORY} tokens after a restart"}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        for name, disk in (("with a disk", Path(folder) / "kv"), ("without", None)):
            journal = Path(folder) / name.replace(" ", "-")
            journal.mkdir()
            found = await restarted(journal, disk)
            figures[name] = {
                "sessions that found all but their last page": sum(cached >= HISTORY - 16 for _, cached in found),
                "median ms to the first token": round(statistics.median(ms for ms, _ in found), 1),
            }
    return figures


def main() -> None:
    save("kv_restart", asyncio.run(measure()))


if __name__ == "__main__":
    main()
