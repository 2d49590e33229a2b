"""What the router adds: latency over talking to the worker directly, tokens a core relays, journal cost."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from array import array
from pathlib import Path

import grpc
import httpx
import psutil

from benchmarks.common import percentile, save, serving
from cluster.ray_cluster import Cluster
from holdfast.tokens import pack_tokens
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.journal import Journal
from router.redis_journal import RedisJournal
from router.sqlite_journal import SqliteJournal
from tests.redis_server import redis_server

PROMPT_LEN, ROUNDS = 32, 300
STREAMS, STREAM_TOKENS = 16, 400
JOURNAL_SESSIONS, JOURNAL_APPENDS = 16, 200
SAMPLING = pb.Sampling(max_tokens=1, ignore_eos=True)


def prompt(number: int) -> list[int]:
    """Another first token each time, so that every turn computes its whole prompt, in all modes."""
    return [100 + number, *range(1000, 1000 + PROMPT_LEN - 1)]


async def direct_ms(address: str) -> list[float]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Attach()
        times = []
        for i in range(ROUNDS):
            submit = worker_pb2.Submit(
                turn_id=f"t{i}",
                session_id=f"turn-t{i}",
                tokens=pack_tokens(array("i", prompt(i))),
                prompt_len=PROMPT_LEN,
                sampling=SAMPLING,
                ephemeral=True,
            )
            began = time.perf_counter()
            await call.write(worker_pb2.RouterMessage(submit=submit))
            while (await call.read()).WhichOneof("message") != "step":
                pass
            times.append(1000 * (time.perf_counter() - began))
        call.cancel()
    return times


async def grpc_ms(stub: session_pb2_grpc.SessionServiceStub, session: str) -> list[float]:
    times = []
    for i in range(ROUNDS):
        # In a session: rewound each time, so that each turn is the same and is journaled.
        request = pb.GenerateRequest(session_id=session, tokens=pb.TokenIds(ids=prompt(i)), sampling=SAMPLING)
        if session and times:
            request.rewind_to = 0
        began = time.perf_counter()
        async for _ in stub.Generate(request):
            pass
        times.append(1000 * (time.perf_counter() - began))
    return times


async def http_ms(http: httpx.AsyncClient) -> list[float]:
    times = []
    for i in range(ROUNDS):
        body = {"prompt": prompt(i), "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        (await http.post("/v1/completions", json=body)).raise_for_status()
        times.append(1000 * (time.perf_counter() - began))
    return times


async def relay(stub: session_pb2_grpc.SessionServiceStub, sessions: bool) -> dict[str, float]:
    """Tokens a second over all streams, and a second of the router's CPU."""
    sampling = pb.Sampling(max_tokens=STREAM_TOKENS, ignore_eos=True)

    async def stream(i: int) -> int:
        name = f"relay-{i}" if sessions else ""
        request = pb.GenerateRequest(session_id=name, tokens=pb.TokenIds(ids=[100 + i]), sampling=sampling)
        return sum([len(answer.tokens) async for answer in stub.Generate(request)])

    router = next(p for p in psutil.process_iter(["name", "cmdline"]) if "RouterActor" in " ".join(p.cmdline() or [""]))
    cpu, began = sum(router.cpu_times()[:2]), time.perf_counter()
    tokens = sum(await asyncio.gather(*(stream(i) for i in range(STREAMS))))
    assert tokens == STREAMS * STREAM_TOKENS
    seconds, cpu = time.perf_counter() - began, sum(router.cpu_times()[:2]) - cpu
    return {"tokens/s": round(tokens / seconds), "tokens per second of router CPU": round(tokens / cpu)}


async def journal_cost(journal: Journal) -> dict[str, float]:
    """Its own appends: what a token waits for it is what its p50 and p99 say."""
    times: list[float] = []

    async def session(i: int) -> None:
        await journal.take(f"s{i}", "", create=True)
        await journal.begin_turn(f"s{i}", 0, "t", 0, array("i", prompt(i)), b"")
        for n in range(JOURNAL_APPENDS):
            began = time.perf_counter()
            await journal.append(f"s{i}", 0, "t", PROMPT_LEN + n, [n])
            times.append(1000 * (time.perf_counter() - began))

    await journal.start()
    began = time.perf_counter()
    await asyncio.gather(*(session(i) for i in range(JOURNAL_SESSIONS)))
    rate = len(times) / (time.perf_counter() - began)
    await journal.close()
    return {
        "appends/s": round(rate),
        "p50 ms": round(percentile(times, 50), 2),
        "p99 ms": round(percentile(times, 99), 2),
    }


async def journal_costs() -> dict[str, dict[str, float]]:
    """Of each store that is here, for each durability."""
    costs = {}
    for durability, appendfsync in (("process", "everysec"), ("power", "always")):
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=Path.cwd()) as folder:
            costs[f"SQLite, {durability}"] = await journal_cost(SqliteJournal(Path(folder) / "j.db", durability))
            if shutil.which("redis-server"):
                with redis_server(Path(folder), "--appendonly", "yes", "--appendfsync", appendfsync) as redis:
                    costs[f"Redis, {durability}"] = await journal_cost(RedisJournal(redis.url, durability))
    return costs


def added(over: list[float], base: list[float]) -> dict[str, float]:
    return {f"p{p} ms": round(percentile(over, p) - percentile(base, p), 2) for p in (50, 99)}


async def measure_latency(cluster: Cluster) -> dict[str, object]:
    address = cluster.worker_addresses()[0].address
    async with grpc.aio.insecure_channel(cluster.grpc_url.removeprefix("grpc://")) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            for warm_up in (direct_ms(address), grpc_ms(stub, ""), http_ms(http)):
                await warm_up
            figures = []
            for mode in (direct_ms(address), grpc_ms(stub, ""), grpc_ms(stub, "s"), http_ms(http)):
                await http.post("/flush_cache")
                figures.append(await mode)
            direct, plain, session, web = figures
        return {
            "one-token turn, directly at the worker": {f"p{p} ms": round(percentile(direct, p), 2) for p in (50, 99)},
            "added by the router": {
                "gRPC, no session": added(plain, direct),
                "gRPC, session (journaled)": added(session, direct),
                "HTTP, no session": added(web, direct),
            },
            f"relay of {STREAMS} streams": {
                "no session": await relay(stub, False),
                "sessions (journaled)": await relay(stub, True),
            },
        }


async def measure() -> dict[str, object]:
    async with serving(workers=1, max_total_tokens=32_768, threads_per_worker=1) as cluster:
        figures = await measure_latency(cluster)
    return figures | {
        f"journal, {JOURNAL_SESSIONS} sessions append at once": await journal_costs(),
    }


def main() -> None:
    save("router", asyncio.run(measure()))


if __name__ == "__main__":
    main()
