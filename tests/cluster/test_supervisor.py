"""The supervisor process: the cluster serves while it is stopped, and restarts after it was killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from openai import AsyncOpenAI

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from tests.cluster.served import Served, serving, stream
from tests.ports import free_port
from tests.waiting import until

GONE_S = 30.0
STOPPED_S, SETTLE_S = 8.0, 4.0
"""Past every silence that the supervisor takes for death; until it would have acted on it."""
NUM_TOKENS = 1000


@asynccontextmanager
async def stub_of(served: Served) -> AsyncIterator[session_pb2_grpc.SessionServiceStub]:
    async with grpc.aio.insecure_channel(served.router()["grpc"]) as channel:
        yield session_pb2_grpc.SessionServiceStub(channel)


def turn(session: str, **resume: int) -> pb.GenerateRequest:
    sampling = pb.Sampling(temperature=0.8, top_k=40, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    return pb.GenerateRequest(
        session_id=session, text="Return the list of", sampling=sampling, request_id=f"turn-of-{session}", **resume
    )


async def test_a_kill_9_of_everything_serving_mid_stream_and_a_restart(tmp_path: Path) -> None:
    ports = ["--port", str(free_port()), "--grpc-port", str(free_port())]
    before, tokens = Served(tmp_path, "--workers", "1", *ports), []
    try:
        serving_pids = [before.process.pid, *(int(worker["pid"]) for worker in before.workers())]
        async with stub_of(before) as stub:
            calm = [token async for answer in stub.Generate(turn("calm")) for token in answer.tokens]
            with pytest.raises(grpc.aio.AioRpcError):
                async for answer in stub.Generate(turn("storm")):
                    tokens += answer.tokens
                    if len(tokens) >= 20:
                        while serving_pids:
                            os.kill(serving_pids.pop(), signal.SIGKILL)
        # Ray's own agents end by themselves too, but a minute later; no port of ours is theirs.
        actors = [p for p in before.left() if "Actor" in " ".join(p.cmdline())]
        await until(lambda: not any(p in before.left() for p in actors), GONE_S, "routers and ranks to end")
    finally:
        before.abandon()
    assert len(calm) == NUM_TOKENS and tokens == calm[: len(tokens)]
    with serving(tmp_path, "--workers", "1", *ports) as after:
        async with stub_of(after) as stub:
            async for answer in stub.Generate(turn("storm", resume_from=len(tokens))):
                assert answer.index == len(tokens) or not answer.tokens
                tokens += answer.tokens
        assert tokens == calm, "none is lost, and none comes twice"
        assert all(report["ok"] for report in after.ask("audit"))


def supervisor_of(served: Served) -> psutil.Process:
    return served.supervisor


def raylet_of(served: Served) -> psutil.Process:
    (raylet,) = [process for process in served.family if process.name() == "raylet"]
    return raylet


@pytest.mark.parametrize("process_of", [supervisor_of, raylet_of])
async def test_a_killed_supervisor_or_raylet_comes_back_and_streams_resume(
    process_of: Callable[[Served], psutil.Process], tmp_path: Path
) -> None:
    ports = ["--port", str(free_port()), "--grpc-port", str(free_port())]
    with serving(tmp_path, "--workers", "1", *ports) as served:
        async with stub_of(served) as stub:
            calm = [token async for answer in stub.Generate(turn("calm")) for token in answer.tokens]
            tokens = list[int]()
            killed = False
            with contextlib.suppress(grpc.aio.AioRpcError):  # ranks notice late that there is no raylet
                async for answer in stub.Generate(turn("storm")):
                    tokens += answer.tokens
                    if len(tokens) >= 20 and not killed:
                        killed = True
                        process_of(served).kill()
        before = served.family
        ready = await asyncio.to_thread(served.next_ready)
        assert ready == served.ready and not any(process.is_running() for process in before)
        async with stub_of(served) as stub:
            async for answer in stub.Generate(turn("storm", resume_from=len(tokens))):
                tokens += answer.tokens
        assert tokens == calm, "none is lost, and none comes twice"
        assert all(report["ok"] for report in served.ask("audit"))


async def test_a_stopped_supervisor_is_not_missed_and_treats_no_process_as_dead(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        before = [served.router()["pid"], *(worker["pid"] for worker in served.workers())]
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            served.supervisor.suspend()
            try:
                text = await stream(client, "s")
                await asyncio.sleep(STOPPED_S)
            finally:
                served.supervisor.resume()
            await asyncio.sleep(SETTLE_S)
            assert await stream(client, "t") == text
        assert [served.router()["pid"], *(worker["pid"] for worker in served.workers())] == before
