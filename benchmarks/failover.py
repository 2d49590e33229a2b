"""From ``kill -9`` of a worker to the next token at the client, split into its parts.

The history is 1k tokens; the other worker has none of it. The router times its own parts; the rest,
from the kill until the router acts, is detection.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import time

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common import save, serving
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc

HISTORY, ROUNDS, KILL_AT, TOKENS_OUT = 1024, 5, 40, 100


class Clients:
    """A client of the router, and the router's metrics."""

    def __init__(self, stub: session_pb2_grpc.SessionServiceStub, http: httpx.AsyncClient) -> None:
        self._stub, self._http = stub, http

    async def stage_s(self) -> dict[str, float]:
        text = (await self._http.get("/metrics")).text
        family = next(f for f in text_string_to_metric_families(text) if f.name == "holdfast_failover_seconds")
        return {s.labels["stage"]: s.value for s in family.samples if s.name.endswith("_sum")}

    async def workers(self) -> list[dict[str, str]]:
        workers: list[dict[str, str]] = (await self._http.get("/holdfast/workers")).json()
        return workers

    async def _pid_of(self, session_id: str) -> int:
        pin = (await self._stub.Get(pb.GetRequest(session_id=session_id))).worker_id
        return next(int(w["pid"]) for w in await self.workers() if w["worker_id"] == pin)

    async def round(self, number: int) -> dict[str, float]:
        session_id = f"s{number}"
        prompt = [10 + (number * 7919 + i * 17) % 2000 for i in range(HISTORY)]
        sampling = pb.Sampling(max_tokens=TOKENS_OUT, ignore_eos=True)
        request = pb.GenerateRequest(session_id=session_id, tokens=pb.TokenIds(ids=prompt), sampling=sampling)
        before = await self.stage_s()
        count, killed_at, began = 0, 0.0, time.perf_counter()
        arrivals: list[float] = []
        pid = None
        async for answer in self._stub.Generate(request):
            arrivals += [time.perf_counter()] * len(answer.tokens)
            count += len(answer.tokens)
            if pid is None:
                pid = asyncio.create_task(self._pid_of(session_id))
            if count >= KILL_AT and not killed_at:
                os.kill(await pid, signal.SIGKILL)
                killed_at = time.perf_counter()
        assert count == TOKENS_OUT, "a token was lost or came twice"
        after = await self.stage_s()
        place_s, first_s = (after[s] - before.get(s, 0.0) for s in ("place", "first_token"))
        # Tokens in flight arrive after the kill, so the pause is the longest gap.
        later = [t for t in arrivals if t > killed_at]
        gaps = {b: b - a for a, b in itertools.pairwise([killed_at, *later])}
        total_s = max(gaps, key=lambda t: gaps[t]) - killed_at
        first_at = arrivals[0]
        return {
            "total": total_s,
            "detect": total_s - place_s - first_s,
            "re-pin": place_s,
            "prefill and first token": first_s,
            "cold prefill of the history, undisturbed": first_at - began,
        }


async def measure() -> dict[str, object]:
    async with serving(workers=2, max_total_tokens=32_768) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        channel = grpc.aio.insecure_channel(cluster.grpc_url.removeprefix("grpc://"))
        clients = Clients(session_pb2_grpc.SessionServiceStub(channel), http)
        rounds = []
        for number in range(ROUNDS):
            rounds.append(await clients.round(number))
            while len(await clients.workers()) < 2:
                await asyncio.sleep(0.2)
        await channel.close()
    return {
        "what": f"kill -9 mid-stream, {HISTORY} tokens of history, {ROUNDS} rounds",
        "ms, median": {stage: round(1000 * statistics.median(r[stage] for r in rounds), 1) for stage in rounds[0]},
        "ms, worst": {stage: round(1000 * max(r[stage] for r in rounds), 1) for stage in rounds[0]},
    }


def main() -> None:
    save("failover", asyncio.run(measure()))


if __name__ == "__main__":
    main()
