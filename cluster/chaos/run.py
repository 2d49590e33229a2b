"""Faults under a verifying load, on a cluster of this machine.

Clients run scripted sessions over gRPC, repeatedly and under new names, and compare every token with an
undisturbed run of the script. Meanwhile processes are killed and stopped, one after another. When a
router dies during a stream, its client resumes at another router from the next token that it has not
seen. Through every other fault the stream must continue by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx

from cluster.chaos.faults import ChaosFailed, Fault, Faults
from holdfast.errors import HoldfastError
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc

SCRIPTS, TURNS, TOKENS = 4, 3, 40
MOMENTS_AT = {TOKENS // 2: "decode", TOKENS - 1: "commit"}
REPEATED = 20
"""Repetitions of a prompt's text: enough that a fault can be injected during its prefill."""
TURN_DEADLINE_S = 90.0
"""No turn may take longer, whichever process dies."""
RETRY_PAUSE_S = 0.05
RETRYABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}
PROMPTS = ("Return the list", "What does os.path.join do?", "help(json.dumps)", "class threading.Lock:")


@dataclass
class Report:
    """The injected faults, and what the clients saw."""

    turns: int = 0
    tokens: int = 0
    resumed: int = 0
    failures: list[str] = field(default_factory=list)
    """Each a turn that lost, repeated or changed a token, or that did not end."""
    pages_leaked: int = 0
    longest_gaps: list[tuple[float, float]] = field(default_factory=list)
    """The longest wait for a token of each turn: start and end, in ``time.monotonic``."""
    faults: list[tuple[float, str]] = field(default_factory=list)
    """Time and kind of each."""
    moments: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        pauses = {kind: self._pauses_with(kind) for _, kind in self.faults}
        return {
            "faults": dict(Counter(kind for _, kind in self.faults)),
            "at": dict(self.moments),
            "turns": self.turns,
            "tokens": self.tokens,
            "turns resumed after their stream broke": self.resumed,
            "turns with a token lost, repeated or changed": len(self.failures),
            "failures": self.failures[:10],
            "pages leaked": self.pages_leaked,
            "longest pause of a turn, s": _spread([end - start for start, end in self.longest_gaps]),
            "by fault, of the turns whose longest pause it fell into, s": {
                kind: _spread(pauses[kind]) for kind in sorted(pauses) if pauses[kind]
            },
        }

    def _pauses_with(self, kind: str) -> list[float]:
        times = [at for at, what in self.faults if what == kind]
        return [end - start for start, end in self.longest_gaps if any(start <= at <= end for at in times)]


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    at = {"p50": len(ordered) // 2, "p99": min(len(ordered) - 1, int(0.99 * len(ordered))), "max": -1}
    return {name: round(ordered[i], 3) for name, i in at.items()} | {"turns": len(values)}


class Chaos:
    """One run. ``urls``: the routers' HTTP addresses. All processes must be on this machine."""

    def __init__(self, urls: list[str], seed: int, others: Sequence[Fault] = ()) -> None:
        self.report = Report()
        self._urls = urls
        self._random = random.Random(seed)
        self._http = httpx.AsyncClient(timeout=10)
        self._faults = Faults(urls, self._http, self._random, others)
        self.report.faults, self.report.moments = self._faults.injected, self._faults.moments
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: list[session_pb2_grpc.SessionServiceStub] = []
        self._expected: list[list[list[int]]] = []
        self._stopping = False
        self._ended = False
        self._number = 0

    def end(self) -> None:
        """Inject no more faults: wait until the cluster has recovered, and report."""
        self._ended = True

    async def run(self, num_faults: int) -> Report:
        """Run the scripts undisturbed, then under ``num_faults`` faults; recover, and audit.

        Raises HoldfastError if a router does not answer at the start.
        """
        clients: list[asyncio.Task[None]] = []
        try:
            for url in self._urls:
                router = await self._router(url)
                channel = self._channels[url] = grpc.aio.insecure_channel(router["grpc"])
                self._stubs.append(session_pb2_grpc.SessionServiceStub(channel))
            for script in range(SCRIPTS):
                self._expected.append(await self._play(script, "calm"))
            clients += [asyncio.create_task(self._client(script)) for script in range(SCRIPTS)]
            for _ in range(num_faults):
                if self._ended:
                    break
                await asyncio.sleep(self._random.uniform(0.2, 1.5))
                await self._faults.inject()
            self._stopping = True
            await asyncio.gather(*clients)
            await self._check_recovered()
        except ChaosFailed as failure:
            # Report the failure with everything seen before it.
            self.report.failures.append(failure.message)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            for channel in self._channels.values():
                await channel.close()
            await self._http.aclose()
        return self.report

    async def _router(self, url: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = (await self._http.get(f"{url}/holdfast/router")).raise_for_status().json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise HoldfastError(f"no router answers at {url}: {error}") from None
        return answer

    # ---- clients ------------------------------------------------------------------------------------

    async def _client(self, script: int) -> None:
        while not self._stopping:
            self._number += 1
            name = f"chaos-{script}-{self._number}"
            try:
                async with asyncio.timeout(TURN_DEADLINE_S * TURNS):
                    outputs = await self._play(script, name)
                for turn, (ours, expected) in enumerate(zip(outputs, self._expected[script], strict=True)):
                    if ours != expected:
                        pairs = enumerate(zip(ours, expected, strict=False))
                        at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(expected)))
                        of = len(expected)
                        self.report.failures.append(f"{name} turn {turn}: differs from token {at} on, of {of}")
                await self._release(name)
            except (TimeoutError, HoldfastError, grpc.aio.AioRpcError) as error:
                self.report.failures.append(f"{name}: {error!r}")

    async def _play(self, script: int, name: str) -> list[list[int]]:
        session = f"{name}-{script}-{os.getpid()}-{time.time_ns()}" if name == "calm" else name
        return [await self._turn(script, turn, session, calm=name == "calm") for turn in range(TURNS)]

    async def _turn(self, script: int, turn: int, session: str, *, calm: bool) -> list[int]:
        """Run one turn through any faults; returns its tokens."""
        sampling = pb.Sampling(temperature=0.8, top_k=50, seed=100 * script + turn, max_tokens=TOKENS, ignore_eos=True)
        turn_id = f"{session}-turn-{turn}"
        request = pb.GenerateRequest(
            session_id=session, text=f" {PROMPTS[script]} {turn}" * REPEATED, sampling=sampling, request_id=turn_id
        )
        tokens: list[int] = []
        began = last = time.monotonic()
        longest = (began, began)
        self._faults.reach("prefill")
        while True:
            try:
                async for answer in self._random.choice(self._stubs).Generate(request, timeout=TURN_DEADLINE_S):
                    if answer.index != len(tokens) and answer.tokens:
                        raise ChaosFailed(f"received token {answer.index}, expected {len(tokens)}")
                    now = time.monotonic()
                    longest, last = max(longest, (last, now), key=lambda gap: gap[1] - gap[0]), now
                    tokens += answer.tokens
                    if len(tokens) in MOMENTS_AT:
                        self._faults.reach(MOMENTS_AT[len(tokens)])
                    if answer.finish_reason:
                        break
                if answer.finish_reason:
                    break
            except grpc.aio.AioRpcError as error:
                not_begun = error.code() is grpc.StatusCode.NOT_FOUND and not tokens
                if error.code() not in RETRYABLE and not not_begun:
                    raise
                if time.monotonic() - began > TURN_DEADLINE_S:
                    raise
                request = _retry(request, tokens, begun=not not_begun)
                await asyncio.sleep(RETRY_PAUSE_S)
        if not calm:
            self.report.turns += 1
            self.report.resumed += request.HasField("resume_from")
            self.report.tokens += len(tokens)
            self.report.longest_gaps.append(longest)
        return tokens

    async def _release(self, session: str) -> None:
        self._faults.reach("release")
        for _ in range(int(TURN_DEADLINE_S / RETRY_PAUSE_S)):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._random.choice(self._stubs).Release(pb.ReleaseRequest(session_id=session), timeout=15)
                return
            await asyncio.sleep(RETRY_PAUSE_S)
        raise ChaosFailed(f"session {session} cannot be released")

    async def _check_recovered(self) -> None:
        """Wait until every process runs again, then audit every page."""
        await self._faults.wait_for_workers()
        await self._faults.wait_for_routers()
        for url in self._urls:
            for report in (await self._http.get(f"{url}/holdfast/audit")).raise_for_status().json():
                for rank in report["ranks"]:
                    for group in rank["groups"]:
                        self.report.pages_leaked += len(group["leaked"]) + len(group["overheld"])
                    if rank["num_running"] or rank["faults"]:
                        self.report.failures.append(f"{report['worker_id']}: {rank}")


def _retry(request: pb.GenerateRequest, tokens: list[int], *, begun: bool) -> pb.GenerateRequest:
    """The request after a broken stream: resume the turn, or send it again if no router had begun it."""
    retry = pb.GenerateRequest()
    retry.CopyFrom(request)
    if begun:
        retry.resume_from = len(tokens)
    else:
        retry.ClearField("resume_from")
    return retry
