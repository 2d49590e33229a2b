"""``holdfast serve`` on one machine: its supervisors may die, and so may the Ray node that all runs on."""

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
from tests.cluster.served import Served, leading_supervisor, serving, stream
from tests.ports import free_port
from tests.waiting import until

GONE_S = 30.0
TAKE_OVER_S = 60.0
STOPPED_S, SETTLE_S = 8.0, 4.0
"""Past every silence that is taken for death; until something would have been done about it."""
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


def kill_the_owner(served: Served) -> None:
    served.owner.kill()


def kill_the_raylet(served: Served) -> None:
    process_of(served, "raylet").kill()


def process_of(served: Served, name: str) -> psutil.Process:
    (found,) = [process for process in served.family if process.name() == name]
    return found


@pytest.mark.parametrize(
    "lose",
    [kill_the_owner, kill_the_raylet],
    ids=lambda lose: lose.__name__,
)
async def test_a_lost_ray_node_is_started_again_and_streams_resume(
    lose: Callable[[Served], None], tmp_path: Path
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
                        lose(served)
        before = served.family
        ready = await asyncio.to_thread(served.next_ready)
        assert ready == served.ready and not any(process.is_running() for process in before)
        async with stub_of(served) as stub:
            async for answer in stub.Generate(turn("storm", resume_from=len(tokens))):
                tokens += answer.tokens
        assert tokens == calm, "none is lost, and none comes twice"
        assert all(report["ok"] for report in served.ask("audit"))


async def test_supervisors_die_and_their_parent_stops_and_nothing_else_is_restarted(tmp_path: Path) -> None:
    with serving(tmp_path) as served:

        def serves() -> set[int]:
            return {process.pid for name in ("RouterActor", "RankActor") for process in served.actors(name)}

        started = serves()
        assert len(started) == 3, "a router, two ranks"
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            calm = await stream(client, "calm")
            await until(lambda: len(served.actors("SupervisorActor")) == 2, TAKE_OVER_S, "a standby")
            leader = leading_supervisor(served.journal)
            assert await stream(client, "leader", 20, psutil.Process(leader).kill) == calm
            await until(lambda: leading_supervisor(served.journal) != leader, TAKE_OVER_S, "the standby to lead")
            await until(lambda: len(served.actors("SupervisorActor")) == 2, TAKE_OVER_S, "another standby")
            both = served.actors("SupervisorActor")

            def kill_both() -> None:
                for process in both:
                    process.kill()

            assert await stream(client, "both", 20, kill_both) == calm
            pids = {process.pid for process in both}
            await until(lambda: leading_supervisor(served.journal) not in pids, TAKE_OVER_S, "another supervisor")
            killed = served.worker_of("both")
            os.kill(int(killed["pid"]), signal.SIGKILL)
            await until(lambda: int(killed["pid"]) not in serves() and len(serves()) == 3, TAKE_OVER_S, "a worker")
            assert started - serves() == {int(killed["pid"])}, "the supervisors keep all that runs"
            assert await stream(client, "last") == calm
            before = serves()
            served.owner.suspend()
            try:
                assert await stream(client, "owner stopped") == calm
                await asyncio.sleep(STOPPED_S)
            finally:
                served.owner.resume()
            await asyncio.sleep(SETTLE_S)
            assert serves() == before, "nobody has missed it"
