"""Faults under a verifying load, on a cluster of this machine: ``holdfast chaos``.

Clients play scripted sessions over gRPC, again and again, each time under new names, and compare every
token with what an undisturbed run of the script said. Meanwhile processes are killed and stopped, one
after another. When a router dies under a stream, its client resumes at another router from the next
token it has not seen; whatever else happens, the stream must go on by itself.
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

from cluster.chaos_faults import ChaosFailed, Fault, Faults
from holdfast.errors import HoldfastError
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc

SCRIPTS, TURNS, TOKENS = 4, 3, 40
MOMENTS_AT = {TOKENS // 2: "decode", TOKENS - 1: "commit"}
REPEATED = 20
"""A prompt's text, so often: enough that a fault can strike while it is computed."""
TURN_DEADLINE_S = 90.0
"""No turn may take longer, whatever dies: it is no hang, then."""
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
    """What was done to the cluster, and what its clients saw."""

    turns: int = 0
    tokens: int = 0
    resumed: int = 0
    wrong: list[str] = field(default_factory=list)
    """Each: a turn that lost, repeated or changed a token, or that did not end."""
    pages_leaked: int = 0
    longest_gaps: list[tuple[float, float]] = field(default_factory=list)
    """Of each turn, the longest wait for a token: from when to when, in ``time.monotonic``."""
    faults: list[tuple[float, str]] = field(default_factory=list)
    """When, and what."""
    moments: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        pauses = {kind: self._pauses_with(kind) for _, kind in self.faults}
        return {
            "faults": dict(Counter(kind for _, kind in self.faults)),
            "at": dict(self.moments),
            "turns": self.turns,
            "tokens": self.tokens,
            "turns gone on with after their stream broke": self.resumed,
            "turns with a token lost, repeated or changed": len(self.wrong),
            "what went wrong": self.wrong[:10],
            "pages leaked": self.pages_leaked,
            "longest pause of a turn, s": _spread([end - start for start, end in self.longest_gaps]),
            "of the turns whose longest pause it fell into, s": {
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
    """One run. ``urls``: the routers' HTTP addresses; all processes are on this machine."""

    def __init__(self, urls: list[str], seed: int, others: Sequence[Fault] = ()) -> None:
        self.report = Report()
        self._urls = urls
        self._random = random.Random(seed)
        self._http = httpx.AsyncClient(timeout=10)
        self._faults = Faults(urls, self._http, self._random, others)
        self.report.faults, self.report.moments = self._faults.struck, self._faults.moments
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: list[session_pb2_grpc.SessionServiceStub] = []
        self._expected: list[list[list[int]]] = []
        self._stopping = False
        self._ended = False
        self._number = 0

    def end(self) -> None:
        """No more faults: let the cluster heal, and report what was seen until now."""
        self._ended = True

    async def run(self, num_faults: int) -> Report:
        """Play undisturbed, then under ``num_faults`` faults; heal, and count the pages."""
        clients: list[asyncio.Task[None]] = []
        try:
            for url in self._urls:
                router = (await self._http.get(f"{url}/holdfast/router")).raise_for_status().json()
                channel = self._channels[url] = grpc.aio.insecure_channel(router["grpc"])
                self._stubs.append(session_pb2_grpc.SessionServiceStub(channel))
            for script in range(SCRIPTS):
                self._expected.append(await self._play(script, "calm"))
            clients += [asyncio.create_task(self._client(script)) for script in range(SCRIPTS)]
            for _ in range(num_faults):
                if self._ended:
                    break
                await asyncio.sleep(self._random.uniform(0.2, 1.5))
                await self._faults.strike()
            self._stopping = True
            await asyncio.gather(*clients)
            await self._heal()
        except ChaosFailed as failure:
            # What was seen until then is worth as much as the failure.
            self.report.wrong.append(failure.message)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
            for channel in self._channels.values():
                await channel.close()
            await self._http.aclose()
        return self.report

    # ---- clients ------------------------------------------------------------------------------------

    async def _client(self, script: int) -> None:
        while not self._stopping:
            self._number += 1
            name = f"chaos-{script}-{self._number}"
            try:
                async with asyncio.timeout(TURN_DEADLINE_S * TURNS):
                    said = await self._play(script, name)
                for turn, (ours, expected) in enumerate(zip(said, self._expected[script], strict=True)):
                    if ours != expected:
                        at = next(i for i, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b)
                        self.report.wrong.append(f"{name} turn {turn}: differs from token {at} on")
                await self._release(name)
            except (TimeoutError, HoldfastError, grpc.aio.AioRpcError, StopIteration) as error:
                self.report.wrong.append(f"{name}: {error!r}")

    async def _play(self, script: int, name: str) -> list[list[int]]:
        session = f"{name}-{script}-{os.getpid()}-{time.time_ns()}" if name == "calm" else name
        return [await self._turn(script, turn, session, calm=name == "calm") for turn in range(TURNS)]

    async def _turn(self, script: int, turn: int, session: str, *, calm: bool) -> list[int]:
        """One turn, through whatever happens; its tokens."""
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
                        raise ChaosFailed(f"token {answer.index} came when {len(tokens)} was due")
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
                request = self._again(request, tokens, begun=not not_begun)
                await asyncio.sleep(RETRY_PAUSE_S)
        if not calm:
            self.report.turns += 1
            self.report.resumed += request.HasField("resume_from")
            self.report.tokens += len(tokens)
            self.report.longest_gaps.append(longest)
        return tokens

    def _again(self, request: pb.GenerateRequest, tokens: list[int], *, begun: bool) -> pb.GenerateRequest:
        """What to ask after a stream broke: go on; or, if no router had begun it, the same once more."""
        again = pb.GenerateRequest()
        again.CopyFrom(request)
        if begun:
            again.resume_from = len(tokens)
        else:
            again.ClearField("resume_from")
        return again

    async def _release(self, session: str) -> None:
        self._faults.reach("release")
        for _ in range(int(TURN_DEADLINE_S / RETRY_PAUSE_S)):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._random.choice(self._stubs).Release(pb.ReleaseRequest(session_id=session), timeout=15)
                return
            await asyncio.sleep(RETRY_PAUSE_S)
        raise ChaosFailed(f"session {session} cannot be released")

    async def _heal(self) -> None:
        """Every process is back; then every page is free, or cached, or a session's that was not released."""
        await self._faults.wait_for_workers()
        await self._faults.wait_for_routers()
        for url in self._urls:
            for report in (await self._http.get(f"{url}/holdfast/audit")).raise_for_status().json():
                for rank in report["ranks"]:
                    self.report.pages_leaked += len(rank["leaked"]) + len(rank["overheld"])
                    if rank["num_running"] or rank["faults"]:
                        self.report.wrong.append(f"{report['worker_id']}: {rank}")
