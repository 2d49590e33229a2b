"""Failover pauses by the length of a session's history, with copies of its KV in the node's store and without.

The floor is what the engine alone takes to load the session: see ``kv_floor``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx

from benchmarks.common import long_context_model, save, serving
from benchmarks.kv_floor import floor_ms
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc

HISTORIES, KILL_AT, TOKENS_OUT = (1024, 8192, 32_768), 20, 300
STORE_GB = 1.0
PATIENT_S = 1800.0
"""A slow CPU computes the longest history for minutes."""


class Sessions:
    """A client that kills the worker under its turn."""

    def __init__(self, stub: session_pb2_grpc.SessionServiceStub, http: httpx.AsyncClient) -> None:
        self._stub, self._http = stub, http

    async def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = (await self._http.get("/holdfast/workers")).json()
        return workers

    async def turn(
        self, session_id: str, tokens: list[int], kill: Callable[[dict[str, Any]], None] | None = None
    ) -> float:
        """The longest wait for a token; of a turn whose worker, as ``workers`` shows it, is killed, after that."""
        sampling = pb.Sampling(max_tokens=TOKENS_OUT, ignore_eos=True)
        request = pb.GenerateRequest(session_id=session_id, tokens=pb.TokenIds(ids=tokens), sampling=sampling)
        arrivals, killed_at, pin = [time.perf_counter()], 0.0, ""
        async for answer in self._stub.Generate(request):
            arrivals += [time.perf_counter()] * len(answer.tokens)
            if kill is not None and not killed_at and len(arrivals) > KILL_AT:
                pin = await self._pin(session_id)
                kill(next(worker for worker in await self.workers() if worker["worker_id"] == pin))
                killed_at = time.perf_counter()
        assert len(arrivals) == TOKENS_OUT + 1, "a token was lost or came twice"
        assert kill is None or await self._pin(session_id) != pin, "the turn was over before its worker died"
        later = [t for t in arrivals if t > killed_at]
        return max(b - a for a, b in itertools.pairwise([killed_at, *later] if kill else arrivals))

    async def _pin(self, session_id: str) -> str:
        session: pb.Session = await self._stub.Get(pb.GetRequest(session_id=session_id))
        return session.worker_id

    async def whole(self) -> None:
        while len(await self.workers()) < 2:
            await asyncio.sleep(0.2)


@asynccontextmanager
async def sessions_of(**settings: Any) -> AsyncIterator[Sessions]:
    """A client of a new cluster with two workers."""
    async with (
        serving(workers=2, max_total_tokens=70_000, token_timeout_s=PATIENT_S, **settings) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=60) as http,
        grpc.aio.insecure_channel(cluster.grpc_url.removeprefix("grpc://")) as channel,
    ):
        yield Sessions(session_pb2_grpc.SessionServiceStub(channel), http)


def history(number: int, length: int) -> list[int]:
    return [10 + (number * 7919 + length + i * 17) % 2000 for i in range(length)]


def kill_9(worker: dict[str, Any]) -> None:
    os.kill(int(worker["pid"]), signal.SIGKILL)


async def pauses(model: Path, store_gb: float, rounds: int) -> dict[str, float]:
    """The median pause in ms by history."""
    found: dict[str, float] = {}
    async with sessions_of(model=model, hicache_size=store_gb) as sessions:
        for length in HISTORIES:
            waits = []
            for number in range(rounds):
                name = f"s{length}-{number}"
                await sessions.turn(name, history(number, length))
                await asyncio.sleep(1.0)  # as long as a user takes at least
                waits.append(await sessions.turn(name, [5, 6, 7], kill_9))
                await sessions.whole()
            found[str(length)] = round(1000 * statistics.median(waits), 1)
    return found


async def measure(rounds: int) -> dict[str, object]:
    with long_context_model(40_960) as model:
        on, off = await pauses(model, STORE_GB, rounds), await pauses(model, 0.0, rounds)
        floor = {str(length): round(floor_ms(model, 1, length), 1) for length in HISTORIES}
    first, last = str(HISTORIES[0]), str(HISTORIES[-1])
    return {
        "what": f"the pause after kill -9 mid-stream, ms by tokens of history, median of {rounds}",
        "with a KV store": on,
        "without": off,
        "floor": floor,
        f"{last} over {first}": {
            "with": round(on[last] / on[first], 2),
            "without": round(off[last] / off[first], 2),
            "what the floor adds, with": round((on[first] + floor[last] - floor[first]) / on[first], 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    save("kv_tiers", asyncio.run(measure(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
