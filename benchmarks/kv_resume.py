"""An idle session whose KV was evicted: loaded from its node's memory and disk, over computed again.

Then sessions that lose their worker together: the longest pause of any, by how many there are, with a KV store and
without, while as many others run or none. Their floor is what the engine alone takes: see ``kv_floor``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import httpx

from benchmarks.common import long_context_model, save, serving
from benchmarks.kv_floor import floor_ms, prompt
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc

HISTORY, ROUNDS = 16_384, 3
TOGETHER, SHORT, KILL_AT, TOKENS_OUT = (1, 16, 64), 1024, 10, 300
STORE_GB = 1.0
Stub = session_pb2_grpc.SessionServiceStub


async def first_token_ms(stub: Any, session: str, tokens: list[int]) -> float:
    """From the request to its token."""
    sampling = pb.Sampling(max_tokens=1, temperature=0, ignore_eos=True)
    request = pb.GenerateRequest(session_id=session, tokens=pb.TokenIds(ids=tokens), sampling=sampling)
    began = time.perf_counter()
    async for _ in stub.Generate(request):
        pass
    return 1000 * (time.perf_counter() - began)


async def counters(http: httpx.AsyncClient) -> dict[str, int]:
    (worker,) = (await http.get("/holdfast/workers")).json()
    store = worker["kv_store"]
    return {name: int(n) for name, n in (worker["counters"] | store["counters"]).items()}


async def resumes(model: Path, disk: Path) -> dict[str, Any]:
    """Medians, by where the KV is. What does not fit in memory is on the disk."""
    found: dict[str, list[float]] = {"computed": [], "memory": [], "disk": []}
    pages = HISTORY // 16
    gigabytes = 1.5 * pages * 65_536 / 1e9  # of memory: one session and a half
    settings: dict[str, Any] = {"hicache_size": gigabytes, "kv_disk_path": disk, "kv_disk_size": 2.0}
    async with (
        serving(model=model, workers=1, max_total_tokens=HISTORY + 4096, **settings) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=60) as http,
        grpc.aio.insecure_channel(cluster.grpc_url.removeprefix("grpc://")) as channel,
    ):
        stub = Stub(channel)
        num_stored = 0

        async def compute(session: str, number: int, length: int) -> float:
            """A session's first turn, which takes all of the device. Returns when the KV is on the disk."""
            nonlocal num_stored
            took_ms = await first_token_ms(stub, session, prompt(number, length))
            num_stored += length // 16
            while (await counters(http)).get("disk_stored", 0) < num_stored:
                await asyncio.sleep(0.1)
            return took_ms

        for number in range(ROUNDS):
            a = f"a{number}"
            found["computed"].append(await compute(a, 4 * number, HISTORY))
            await compute(f"b{number}", 4 * number + 1, HISTORY // 2)
            found["memory"].append(await first_token_ms(stub, a, [7]))
            for i in (2, 3):  # memory has room for one session and a half
                found["computed"].append(await compute(f"c{number}-{i}", 4 * number + i, HISTORY))
            found["disk"].append(await first_token_ms(stub, a, [8]))
        seen = await counters(http)
    medians = {where: statistics.median(times) for where, times in found.items()}
    return {
        "what": f"first token of a session with {HISTORY} tokens that was evicted, ms, median",
        **{where: round(ms, 1) for where, ms in medians.items()},
        "over computed": {where: round(medians[where] / medians["computed"], 3) for where in ("memory", "disk")},
        "pages loaded from memory, from disk": [seen.get("kv_pages_from_memory", 0), seen.get("kv_pages_from_disk", 0)],
    }


async def stream(stub: Any, session: str, tokens: list[int], arrivals: list[float]) -> None:
    sampling = pb.Sampling(max_tokens=TOKENS_OUT, ignore_eos=True)
    request = pb.GenerateRequest(session_id=session, tokens=pb.TokenIds(ids=tokens), sampling=sampling)
    async for answer in stub.Generate(request):
        arrivals += [time.perf_counter()] * len(answer.tokens)
    assert len(arrivals) == TOKENS_OUT, "a token was lost or came twice"


async def pause_ms(stub: Any, http: httpx.AsyncClient, count: int, number: int, *, others: bool) -> float:
    """The longest wait of ``count`` sessions whose worker is killed under their turns. ``number``: of the kill.

    ``others``: whether as many run on the other worker.
    """
    names = [f"n{number}-{i}" for i in range(2 * count)]
    for first in range(0, len(names), 8):
        some = list(enumerate(names))[first : first + 8]
        await asyncio.gather(*(first_token_ms(stub, name, prompt(1000 * number + i, SHORT)) for i, name in some))
    await asyncio.sleep(2.0)
    pins = {name: (await stub.Get(pb.GetRequest(session_id=name))).worker_id for name in names}
    workers = (await http.get("/holdfast/workers")).json()
    victim = pins[names[0]]
    pid = next(int(w["pid"]) for w in workers if w["worker_id"] == victim)
    arrivals: dict[str, list[float]] = {name: [] for name in names if others or pins[name] == victim}
    turns = [asyncio.create_task(stream(stub, name, [5, 6, 7], times)) for name, times in arrivals.items()]
    while min(len(times) for times in arrivals.values()) < KILL_AT:
        await asyncio.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    killed_at = time.perf_counter()
    await asyncio.gather(*turns)
    waits = []
    for name in (name for name in arrivals if pins[name] == victim):
        later = [killed_at, *(t for t in arrivals[name] if t > killed_at)]
        waits.append(max((b - a for a, b in itertools.pairwise(later)), default=0.0))
    while len((await http.get("/holdfast/workers")).json()) < 2:
        await asyncio.sleep(0.2)
    for name in names:
        await stub.Release(pb.ReleaseRequest(session_id=name))
    return 1000 * max(waits)


async def pauses(model: Path, store_gb: float, *, others: bool) -> dict[str, float]:
    """Medians by the number of sessions."""
    found, numbers = dict[str, float](), itertools.count()
    async with (
        serving(
            model=model, workers=2, max_total_tokens=170_000, max_running_requests=144, hicache_size=store_gb
        ) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=60) as http,
        grpc.aio.insecure_channel(cluster.grpc_url.removeprefix("grpc://")) as channel,
    ):
        for count in TOGETHER:
            waits = [await pause_ms(Stub(channel), http, count, next(numbers), others=others) for _ in range(ROUNDS)]
            found[str(count)] = round(statistics.median(waits), 1)
    return found


async def measure() -> dict[str, Any]:
    with long_context_model(40_960) as model, tempfile.TemporaryDirectory(prefix="holdfast-bench-") as disk:
        figures: dict[str, Any] = {"resume": await resumes(model, Path(disk) / "kv")}
        on, off = [await pauses(model, size, others=True) for size in (STORE_GB, 0.0)]
        alone = await pauses(model, STORE_GB, others=False)
        floor = {str(count): round(floor_ms(model, count, SHORT), 1) for count in TOGETHER}
    last, first = str(TOGETHER[-1]), str(TOGETHER[0])
    figures["lost together"] = {
        "what": f"the longest pause in ms of so many sessions with {SHORT} tokens each, median of {ROUNDS}",
        "with a KV store, as many others run": on,
        "without a store, as many others run": off,
        "with a KV store, no others": alone,
        "floor": floor,
        f"{last} over {first}": {
            "with": round(on[last] / on[first], 2),
            "without": round(off[last] / off[first], 2),
            "no others": round(alone[last] / alone[first], 2),
            "the floor over the pause of one": round(floor[last] / alone[first], 2),
        },
    }
    return figures


def main() -> None:
    save("kv_resume", asyncio.run(measure()))


if __name__ == "__main__":
    main()
