"""The cost of the router: latency over asking the worker directly, tokens relayed per core, journal writes."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil

from benchmarks.common import save, serving
from cluster.bench.report import percentile
from cluster.ray_backend.cluster import Cluster
from holdfast.tokens import pack_tokens
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.journal.interface import Journal
from router.journal.redis import RedisJournal
from router.journal.sqlite import SqliteJournal
from tests.redis_server import redis_server

PROMPT_LEN, ROUNDS, WARM_UP = 32, 300, 10
MODES = 4
"""The modes of a round: directly, over gRPC without and with a session, over HTTP."""
STREAMS, STREAM_TOKENS = 16, 400
JOURNAL_SESSIONS, JOURNAL_APPENDS, JOURNAL_ROUNDS = 16, 200, 5
SETTINGS: dict[str, Any] = {"max_total_tokens": 32_768, "threads_per_worker": 1, "insecure_internal": True}
"""A worker takes turns from whoever has a router's certificate. What those cost: see ``benchmarks.tls``."""
SAMPLING = pb.Sampling(max_tokens=1, ignore_eos=True)


def prompt(number: int) -> list[int]:
    """A different first token each time, so that every turn computes its whole prompt."""
    return [100 + number, *range(1000, 1000 + PROMPT_LEN - 1)]


class Direct:
    """Turns submitted to a worker directly, on one stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = worker_pb2_grpc.WorkerServiceStub(channel).Attach()

    async def turn(self, i: int) -> None:
        submit = worker_pb2.Submit(
            turn_id=f"t{i}",
            session_id=f"turn-t{i}",
            tokens=pack_tokens(array("i", prompt(i))),
            prompt_len=PROMPT_LEN,
            sampling=SAMPLING,
            ephemeral=True,
        )
        await self._call.write(worker_pb2.RouterMessage(submit=submit))
        while (await self._call.read()).WhichOneof("message") != "step":
            pass


async def grpc_turn(stub: session_pb2_grpc.SessionServiceStub, session: str, i: int) -> None:
    # With a session: rewound each time, so that each turn is the same, and journaled.
    request = pb.GenerateRequest(session_id=session, tokens=pb.TokenIds(ids=prompt(i)), sampling=SAMPLING)
    if session and i >= MODES:
        request.rewind_to = 0
    async for _ in stub.Generate(request):
        pass


async def http_turn(http: httpx.AsyncClient, i: int) -> None:
    body = {"prompt": prompt(i), "max_tokens": 1, "temperature": 0}
    (await http.post("/v1/completions", json=body)).raise_for_status()


async def relay(stub: session_pb2_grpc.SessionServiceStub, sessions: bool) -> dict[str, float]:
    """Tokens per second over all streams, and per second of the router's CPU."""
    sampling = pb.Sampling(max_tokens=STREAM_TOKENS, ignore_eos=True)

    async def stream(i: int) -> int:
        name = f"relay-{i}" if sessions else ""
        request = pb.GenerateRequest(session_id=name, tokens=pb.TokenIds(ids=[100 + i]), sampling=sampling)
        return sum([len(answer.tokens) async for answer in stub.Generate(request)])

    router = next(p for p in psutil.Process().children(recursive=True) if "RouterActor" in " ".join(p.cmdline()))
    cpu, began = sum(router.cpu_times()[:2]), time.perf_counter()
    tokens = sum(await asyncio.gather(*(stream(i) for i in range(STREAMS))))
    assert tokens == STREAMS * STREAM_TOKENS
    seconds, cpu = time.perf_counter() - began, sum(router.cpu_times()[:2]) - cpu
    return {"tokens/s": round(tokens / seconds), "tokens per second of router CPU": round(tokens / max(cpu, 0.01))}


async def journal_cost(journal: Journal) -> dict[str, float]:
    """Appends of concurrent sessions. Their p50 and p99 are how long a token waits for its own."""
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
    """Every available store with each durability: the median of rounds that alternate between them."""
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(JOURNAL_ROUNDS):
        for durability, appendfsync in (("process", "everysec"), ("power", "always")):
            with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=Path.cwd()) as folder:
                cost = await journal_cost(SqliteJournal(Path(folder) / "j.db", durability))
                rounds.setdefault(f"SQLite, {durability}", []).append(cost)
                if shutil.which("redis-server"):
                    with redis_server(Path(folder), "--appendonly", "yes", "--appendfsync", appendfsync) as redis:
                        cost = await journal_cost(RedisJournal(redis.url, durability))
                        rounds.setdefault(f"Redis, {durability}", []).append(cost)
    return {
        name: {figure: statistics.median(cost[figure] for cost in costs) for figure in costs[0]}
        for name, costs in rounds.items()
    }


def added(over: list[float], base: list[float]) -> dict[str, float]:
    return {f"p{p} ms": round(percentile(over, p) - percentile(base, p), 2) for p in (50, 99)}


async def measure_latency(cluster: Cluster) -> dict[str, dict[str, Any]]:
    address, target = cluster.worker_addresses()[0].address, cluster.grpc_url.removeprefix("grpc://")
    async with (
        grpc.aio.insecure_channel(address) as worker,
        grpc.aio.insecure_channel(target) as channel,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        stub = session_pb2_grpc.SessionServiceStub(channel)
        turns = (
            Direct(worker).turn,
            partial(grpc_turn, stub, ""),
            partial(grpc_turn, stub, "s"),
            partial(http_turn, http),
        )
        times: list[float] = []
        # Modes alternate, so that other load on the machine affects all of them.
        for i in range(MODES * (WARM_UP + ROUNDS)):
            began = time.perf_counter()
            await turns[i % MODES](i)
            times.append(1000 * (time.perf_counter() - began))
        direct, plain, session, web = (times[MODES * WARM_UP + mode :: MODES] for mode in range(MODES))
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


async def measure() -> dict[str, dict[str, Any]]:
    async with serving(workers=1, **SETTINGS) as cluster:
        figures = await measure_latency(cluster)
    return figures | {
        f"journal, {JOURNAL_SESSIONS} sessions append at once": await journal_costs(),
    }


def main() -> None:
    save("router", asyncio.run(measure()))


if __name__ == "__main__":
    main()
