"""A rank's lifeline ends: its worker's turns fail over, whatever its other connections say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.v1 import session_pb2_grpc
from tests.harness import ENGINE, HOST, running
from tests.router.test_failover import stream_turn
from tests.waiting import until


async def test_a_worker_is_lost_when_the_lifeline_of_a_rank_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its stream is still open then: the kernel is busy with the memory of its process."""
    held: list[asyncio.StreamWriter] = []
    lifeline = await asyncio.start_server(lambda reader, writer: held.append(writer), HOST, 0)
    port = lifeline.sockets[0].getsockname()[1]

    async def end() -> None:
        assert cluster.pinned_to("s") == "w0"
        lifeline.close()
        for each in held:
            each.close()

    async with running(tmp_path, num_workers=0) as cluster:
        await cluster.start_worker("w0", 1, ENGINE, tp=2, lifeline=f"{HOST}:{port}")
        await until(lambda: len(held) == 2, 20, "the router to watch both ranks")
        async with cluster.channel() as channel:
            stub = session_pb2_grpc.SessionServiceStub(channel)
            await stream_turn(stub, "s")
            await cluster.start_worker("w1", 1, ENGINE)
            assert len(await stream_turn(stub, "s", 20, end)) == 60
            assert cluster.pinned_to("s") == "w1"
        await until(lambda: len(cluster.router.core.fleet.alive()) == 2, 20, "the router to reach it again")
    assert "a process of it has ended; failing over 1 turns" in caplog.text
