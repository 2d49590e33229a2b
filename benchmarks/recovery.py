"""How long clients wait after larger failures, compared to the floor: what must be computed again.

- a worker, with 1, 16 and 64 turns under way on it at 1k tokens of history each; floor: computing as many
  histories for newcomers
- a router, with 16 streams; floor: its lease
- a worker that is drained with 64 idle sessions: the next turn of each, with and without their KV; floor:
  a session that stayed where it was
- the whole cluster, with 1,000 sessions in the journal: from its start to an old session's next token
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import httpx

from benchmarks.common import save, serving
from cluster.bench.report import percentile
from cluster.ray_backend.cluster import Cluster
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router.journal.interface import ROUTER_LEASE_S

HISTORY, TOKENS_OUT, KILL_AT = 1024, 150, 10
LIVE = (1, 16, 64)
ROUTER_STREAMS, ROUTER_TOKENS = 16, 300
IDLE, OLD_SESSIONS = 64, 1000
SETTINGS: dict[str, Any] = {"max_total_tokens": 163_840, "max_running_requests": 64, "rebalance_per_s": 0}


def prompt(number: int, length: int) -> pb.TokenIds:
    return pb.TokenIds(ids=[10 + (number * 7919 + i * 17) % 2000 for i in range(length)])


def ms(seconds: list[float]) -> dict[str, float]:
    return {name: round(1000 * percentile(seconds, p), 1) for name, p in (("p50", 50), ("p99", 99), ("max", 100))}


class Client:
    """Streams of turns through the cluster's routers, with the arrival times of their tokens."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._stubs = [
            session_pb2_grpc.SessionServiceStub(grpc.aio.insecure_channel(url.removeprefix("grpc://")))
            for url in cluster.grpc_urls
        ]
        self.http = httpx.AsyncClient(timeout=60)

    async def turn(self, session: str, tokens: pb.TokenIds, max_tokens: int, arrivals: list[float]) -> None:
        """One turn; resumed at another router when its own dies."""
        sampling = pb.Sampling(max_tokens=max_tokens, ignore_eos=True)
        turn_id = f"{session}-{time.monotonic_ns()}"
        first = pb.GenerateRequest(session_id=session, tokens=tokens, sampling=sampling, request_id=turn_id)
        request = first
        for attempt in range(1000):
            try:
                async for answer in self._stubs[attempt % len(self._stubs)].Generate(request):
                    assert not answer.tokens or answer.index == len(arrivals), "a token was lost or came twice"
                    arrivals += [time.perf_counter()] * len(answer.tokens)
                assert len(arrivals) == max_tokens
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND and not arrivals:
                    begun = False  # the router died before the journal knew of the turn
                elif error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED):
                    begun = True
                else:
                    raise
            request = first
            if begun:
                request = pb.GenerateRequest(session_id=session, request_id=turn_id, resume_from=len(arrivals))
            await asyncio.sleep(0.02)
        raise AssertionError("no router resumes the turn")

    async def workers(self) -> list[dict[str, Any]]:
        for url in self.cluster.urls:
            try:
                workers: list[dict[str, Any]] = (await self.http.get(f"{url}/holdfast/workers")).json()
                return workers
            except httpx.HTTPError:
                continue
        return []

    async def whole(self) -> None:
        while len(await self.workers()) < 2:
            await asyncio.sleep(0.2)


def pauses(streams: list[list[float]], since: float) -> list[float]:
    """The longest wait for a token after that time, of each stream that was not done by then."""
    longest = []
    for stream in streams:
        later = [t for t in stream if t > since]
        if later:
            longest.append(max(b - a for a, b in itertools.pairwise([since, *later])))
    return longest


async def kill_worker(client: Client, num_live: int) -> dict[str, Any]:
    """Run twice as many turns on two workers and kill one, so that its half fails over to the other."""
    await client.whole()
    names = [f"w{num_live}-{i}" for i in range(2 * num_live)]
    streams: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    turns = [
        asyncio.create_task(client.turn(name, prompt(1000 * num_live + i, HISTORY), TOKENS_OUT, streams[name]))
        for i, name in enumerate(names)
    ]
    while any(len(stream) < KILL_AT for stream in streams.values()):
        await asyncio.sleep(0.005)
    cold = [stream[0] - began for stream in streams.values()]
    listed = (await client.http.get(f"{client.cluster.urls[0]}/holdfast/sessions")).json()
    homes = {s["session_id"]: s["worker"].split("@")[0] for s in listed if s["session_id"] in names}
    loaded = max(set(homes.values()), key=[*homes.values()].count)
    victim = next(w for w in await client.workers() if w["worker_id"] == loaded)
    os.kill(int(victim["pid"]), signal.SIGKILL)
    killed = time.perf_counter()
    await asyncio.gather(*turns)
    moved = pauses([streams[name] for name in names if homes[name] == loaded], killed)
    return {
        "turns that moved": len(moved),
        "pause, ms": ms(moved),
        "floor: both workers compute as many histories each, undisturbed, ms": ms(cold),
    }


async def kill_router(client: Client) -> dict[str, Any]:
    await client.whole()
    streams: list[list[float]] = [[] for _ in range(ROUTER_STREAMS)]
    turns = [
        asyncio.create_task(client.turn(f"r{i}", prompt(i, 64), ROUTER_TOKENS, streams[i]))
        for i in range(ROUTER_STREAMS)
    ]
    while any(len(stream) < KILL_AT for stream in streams):
        await asyncio.sleep(0.005)
    pid = (await client.http.get(f"{client.cluster.urls[0]}/holdfast/router")).json()["pid"]
    os.kill(int(pid), signal.SIGKILL)
    killed = time.perf_counter()
    await asyncio.gather(*turns)
    return {"pause, ms": ms(pauses(streams, killed)), "floor: the router's lease, ms": 1000 * ROUTER_LEASE_S}


async def drain(client: Client) -> dict[str, Any]:
    """Drain a worker with idle sessions; then run the next turn of each, one after another."""
    await client.whole()
    names = [f"d{i}" for i in range(2 * IDLE)]
    for first in range(0, len(names), 16):
        turns = (client.turn(f"d{i}", prompt(5000 + i, HISTORY), 1, []) for i in range(first, first + 16))
        await asyncio.gather(*turns)

    async def next_turns(sessions: list[str]) -> list[float]:
        took = []
        for session in sessions:
            began = time.perf_counter()
            await client.turn(session, prompt(7, 8), 1, [])
            took.append(time.perf_counter() - began)
        return took

    listed = (await client.http.get(f"{client.cluster.urls[0]}/holdfast/sessions")).json()
    on = {s["session_id"]: s["worker"].split("@")[0] for s in listed if s["session_id"] in names}
    drained = max(set(on.values()), key=[*on.values()].count)
    moving = [name for name, worker in on.items() if worker == drained][:IDLE]
    staying = [name for name, worker in on.items() if worker != drained]
    answer = (await client.http.post(f"{client.cluster.urls[0]}/holdfast/workers/{drained}/drain")).json()
    return {
        "sessions migrated with their KV": answer["sessions_migrated"],
        "sessions left to be computed again": answer["sessions_left"],
        "KV, MB": round(answer["bytes"] / 1e6, 1),
        "the drain, ms": round(1000 * answer["seconds"], 1),
        "next turn of a session that left, ms": ms(await next_turns(moving)),
        "floor: next turn of a session that stayed, ms": ms(await next_turns(staying)),
    }


async def restart(folder: Path) -> dict[str, Any]:
    """Serve the journal's sessions with new processes: from the start to an old session's next token."""
    began = time.perf_counter()
    async with serving(folder, **SETTINGS, routers=2) as cluster:
        serving_s = time.perf_counter() - began
        client, arrivals = Client(cluster), list[float]()
        await client.turn("old7", prompt(1, 4), 2, arrivals)
        first_ms = 1000 * (arrivals[0] - began - serving_s)
    return {
        "until it serves, s (Ray, processes, models)": round(serving_s, 2),
        "then an old session's next token, ms": round(first_ms, 1),
    }


async def measure() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        folder = Path(name)
        async with serving(folder, **SETTINGS, routers=2) as cluster:
            client = Client(cluster)
            for num_live in LIVE:
                what = f"kill -9 of a worker, {num_live} live turns at {HISTORY} tokens"
                figures[what] = await kill_worker(client, num_live)
            figures[f"kill -9 of a router, {ROUTER_STREAMS} streams"] = await kill_router(client)
            for first in range(0, OLD_SESSIONS, 100):
                turns = (client.turn(f"old{i}", prompt(i, 16), 1, []) for i in range(first, first + 100))
                await asyncio.gather(*turns)
        what = f"restart of everything, {OLD_SESSIONS} sessions in the journal"
        figures[what] = await restart(folder)
    for how, migration_timeout_s in (("migrated", 60.0), ("computed again", 0.0)):
        async with serving(**SETTINGS, migration_timeout_s=migration_timeout_s) as cluster:
            what = f"drain of a worker with {IDLE} idle sessions at {HISTORY} tokens: KV {how}"
            figures[what] = await drain(Client(cluster))
    return figures


def main() -> None:
    save("recovery", asyncio.run(measure()))


if __name__ == "__main__":
    main()
