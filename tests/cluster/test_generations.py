"""A GCS loses its state: the cluster goes over to another Ray node beside its own, and no client sees a break."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
import pytest
from openai import AsyncOpenAI

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from tests.cluster.served import HTTP, START_DEADLINE_S, Served, leading_supervisor, serving, stream
from tests.waiting import until
from workers.store.folders import ARENA, MEMORY

GONE_S = 90.0
NUM_LONG, NUM_BEFORE = 3000, 40
NUM_IDLE = 6
PAUSE_S = 0.1


def storage(gcs: psutil.Process) -> Path:
    return Path(gcs.environ()["RAY_gcs_storage_path"])


def delete(gcs: psutil.Process) -> None:
    """All of it, as what cleans /tmp might."""
    shutil.rmtree(storage(gcs).parent)


def damage(gcs: psutil.Process) -> None:
    for path in storage(gcs).rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")


async def slow_stream(stub: session_pb2_grpc.SessionServiceStub, session: str, go_on: asyncio.Event) -> list[int]:
    """A turn whose client reads its beginning, and the rest when it may."""
    sampling = pb.Sampling(temperature=0.8, top_k=40, seed=3, max_tokens=NUM_LONG, ignore_eos=True)
    tokens = list[int]()
    async for answer in stub.Generate(
        pb.GenerateRequest(session_id=session, text="Return the list of", sampling=sampling)
    ):
        assert answer.index == len(tokens) or not answer.tokens
        tokens += answer.tokens
        if len(tokens) >= NUM_BEFORE:
            await go_on.wait()
    return tokens


async def turn(stub: session_pb2_grpc.SessionServiceStub, session: str, text: str) -> tuple[list[int], int]:
    """An idle session's next turn, and how many tokens before it were not computed again."""
    sampling = pb.Sampling(temperature=0.8, seed=7, max_tokens=60, ignore_eos=True)
    tokens, num_cached = list[int](), 0
    async for answer in stub.Generate(pb.GenerateRequest(session_id=session, text=text, sampling=sampling)):
        tokens, num_cached = tokens + list(answer.tokens), answer.cached_tokens
    return tokens, num_cached


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def has_others(served: Served, before: list[psutil.Process]) -> bool:
    """Whether its two workers are none of these processes."""
    workers, known = served.workers(), {process.pid for process in before}
    return len(workers) == 2 and not any(int(worker["pid"]) in known for worker in workers)


def arenas_of(processes: list[psutil.Process]) -> list[Path]:
    """What KV stores among these processes have in shared memory, or left there."""
    return [path for process in processes for path in MEMORY.glob(f"holdfast-*/*/{ARENA}{process.pid}")]


@pytest.mark.parametrize("lose", [delete, damage], ids=lambda lose: lose.__name__)
async def test_a_lost_gcs_state_takes_the_cluster_to_another_node(
    lose: Callable[[psutil.Process], None], tmp_path: Path
) -> None:
    with serving(tmp_path, "--hicache-size", "0.02") as served:
        async with (
            AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
            grpc.aio.insecure_channel(served.router()["grpc"]) as channel,
        ):
            stub = session_pb2_grpc.SessionServiceStub(channel)
            go_on, at_once, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
            at_once.set()
            calm, calm_long = await stream(client, "calm"), await slow_stream(stub, "long", at_once)
            first = await turn(stub, "alone", "The function")
            second = await turn(stub, "alone", " and then")
            assert second[1] > 60
            for i in range(NUM_IDLE):
                assert (await turn(stub, f"idle{i}", "The function"))[0] == first[0]

            async def turns() -> int:
                number = 0
                while not over.is_set():
                    assert await stream(client, f"steady{number}") == calm
                    number += 1
                    await asyncio.sleep(PAUSE_S)
                return number

            live, steady = asyncio.create_task(slow_stream(stub, "live", go_on)), asyncio.create_task(turns())
            await stream(client, "other")  # the supervisors are known, and the live turn is under way
            before, leader = served.family + served.actors(""), leading_supervisor(served.journal)
            (gcs,) = [process for process in before if process.name() == "gcs_server"]
            assert arenas_of(before), "it has a KV store"
            lose(gcs)
            gcs.kill()
            assert await asyncio.to_thread(served.next_ready) == served.ready
            assert not live.done(), "its router waits for it"
            await until(lambda: has_others(served, before), GONE_S, "workers of the next generation")
            go_on.set()
            assert await live == calm_long
            await until(lambda: not any(map(lives, before)), GONE_S, "the node before to end")
            await until(lambda: not arenas_of(before), GONE_S, "its store's memory to be free")
            over.set()
            assert await steady > 1
            thirds = [await turn(stub, f"idle{i}", " and then") for i in range(NUM_IDLE)]
            assert all(tokens == second[0] for tokens, _ in thirds)
            assert second in thirds, "they migrated with their KV, as far as a busy machine lets them in time"
            assert leading_supervisor(served.journal) != leader
            served.family += psutil.Process(served.process.pid).children(recursive=True)
            killed = served.worker_of("idle0")
            os.kill(int(killed["pid"]), signal.SIGKILL)
            await until(
                lambda: all(w["pid"] != killed["pid"] for w in served.workers()) and len(served.workers()) == 2,
                START_DEADLINE_S,
                "what dies to be started again",
            )
        assert HTTP.get(f"{served.url}/health").json() == {"status": "ok"}
        assert all(report["ok"] for report in served.audits())


async def test_a_stop_while_the_next_generation_starts_ends_both(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "1") as served:
        (gcs,) = [process for process in served.family if process.name() == "gcs_server"]
        delete(gcs)
        gcs.kill()
        guard = psutil.Process(served.process.pid)
        await until(lambda: len(guard.children()) == 2, GONE_S, "the next generation")
