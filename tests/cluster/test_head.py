"""The head node of a cluster dies, GCS and all, and comes back with the state that its GCS keeps in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pytest
from openai import APIError, AsyncOpenAI

from tests.cluster.ray_head import RayHead, kill, ray_head, started_node
from tests.cluster.served import COMMAND_DEADLINE_S, HOLDFAST, HTTP, OVERLAP, actors_under, stream
from tests.ports import free_port
from tests.redis_server import redis_server
from tests.waiting import until

HEAD, NODE = "127.0.0.2", "127.0.0.1"
NODE_S = 60.0
NOTICED_S = 30.0
BACK_S = 120.0
HOUR_S, PAUSE_S = 3600.0, 4.0
KILLED_AT_S = (120.0, 1800.0, 3480.0)
"""Ranks of the hour."""
NUM_STREAMS = 16


class Machines:
    """A head with nothing but Ray, and a node that everything of ours runs on."""

    def __init__(self, head: RayHead, node: psutil.Process, journal_url: str) -> None:
        self.head, self._node = head, node
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._flags = ("--port", str(port), "--grpc-port", "0", "--journal-url", journal_url)
        self._flags += ("--device", "cpu", OVERLAP)

    async def run(self, command: str, *words: str, on: str = NODE) -> None:
        # The GCS answers at both addresses. A command takes the raylet at the one it is given for its own machine's.
        address = self.head.address.replace(HEAD, on)
        line = [*HOLDFAST, command, "--address", address, *words]
        done = await asyncio.to_thread(subprocess.run, line, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
        assert done.returncode == 0, done.stderr

    async def serve(self, on: str, *flags: str) -> None:
        """Start the cluster from that machine, which its routers run on."""
        await self.run("serve", "--detach", *self._flags, *flags, on=on)

    def pids(self, name: str) -> set[int]:
        """Of actors on the node."""
        return {process.pid for process in actors_under(self._node, name)}

    def serving(self) -> set[int]:
        return self.pids("RouterActor") | self.pids("RankActor")

    def supervisors(self) -> list[psutil.Process]:
        return [*actors_under(self._node, "SupervisorActor"), *self.head.actors("SupervisorActor")]

    def num_supervisors(self) -> int:
        return len(self.supervisors())

    def health(self) -> dict[str, Any]:
        return dict(HTTP.get(f"{self.url}/health").json())

    def audits(self) -> list[dict[str, Any]]:
        return list(HTTP.get(f"{self.url}/holdfast/audit").json())

    def rank_of(self, session: str) -> int:
        """The pid of the rank that a session is pinned to."""
        sessions = HTTP.get(f"{self.url}/holdfast/sessions").json()
        pin = next(each["worker"] for each in sessions if each["session_id"] == session)
        workers = HTTP.get(f"{self.url}/holdfast/workers").json()
        return next(int(w["pid"]) for w in workers if f"{w['worker_id']}@{w['incarnation']}" == pin)


@contextmanager
def joined_node(address: str, folder: Path) -> Iterator[psutil.Process]:
    options = ["--num-cpus", "4", "--temp-dir", str(folder), "--node-ip-address", NODE]
    node = started_node([*HOLDFAST, "join", address, *options], folder / "node.log", {})
    try:
        yield node
    finally:
        kill([*node.children(recursive=True), node])


@pytest.fixture
def in_long_runs(long: bool) -> None:
    if not long:
        pytest.skip("make test-long")


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with (
        redis_server(tmp_path / "redis", "--appendonly", "yes", "--appendfsync", "always") as redis,
        # A short path: names of sockets may not be long. Nodes that share a folder may choose the same ones.
        TemporaryDirectory(prefix="holdfast-") as of_head,
        TemporaryDirectory(prefix="holdfast-") as of_node,
        ray_head(tmp_path, 0, HEAD, Path(of_head), RAY_REDIS_ADDRESS=f"127.0.0.1:{redis.port}") as head,
        joined_node(head.address, Path(of_node)) as node,
    ):
        yield Machines(head, node, redis.url)


async def test_the_head_dies_under_streams_and_comes_back(machines: Machines) -> None:
    await machines.serve(on=NODE)
    before = machines.serving()
    assert len(before) == 3, "a router, two ranks"
    async with AsyncOpenAI(base_url=f"{machines.url}/v1", api_key="none", max_retries=0) as client:
        calm = await stream(client, "calm")
        assert await stream(client, "under a kill", 20, machines.head.kill) == calm
        await until(lambda: machines.health()["status"] == "degraded", NOTICED_S, "the router to notice")
        (killed, *_) = machines.pids("RankActor")
        assert await stream(client, "under two", 20, lambda: os.kill(killed, signal.SIGKILL)) == calm
        assert machines.serving() == before - {killed}
        await asyncio.to_thread(machines.head.start)
        await until(lambda: machines.health() == {"status": "ok"}, BACK_S, "the GCS")
        await until(lambda: len(machines.serving()) == 3, BACK_S, "the killed rank's next incarnation")
        assert machines.serving() >= before - {killed}, "nothing is restarted that lives"
        await until(lambda: machines.num_supervisors() == 2, BACK_S, "two supervisors")
        assert await stream(client, "last") == calm
    await machines.run("stop")
    assert not machines.serving()


async def test_an_hour_without_head_and_supervisors(in_long_runs: None, machines: Machines) -> None:
    serve = partial(machines.serve, NODE, "--workers", str(len(KILLED_AT_S) + 1))
    await serve()
    before, killed = machines.serving(), set[int]()
    async with AsyncOpenAI(base_url=f"{machines.url}/v1", api_key="none", max_retries=0) as client:
        calm = await stream(client, "calm")

        def lose_both() -> None:
            kill(machines.supervisors())
            machines.head.kill()

        # In a thread, as it waits for their ends: the streams are read meanwhile.
        losing = ThreadPoolExecutor(1)
        lose = partial(losing.submit, lose_both)
        streams = [stream(client, f"s{i}", 20 if i == 0 else -1, lose) for i in range(NUM_STREAMS)]
        assert await asyncio.gather(*streams) == [calm] * NUM_STREAMS
        losing.shutdown()
        await until(lambda: machines.health()["status"] == "degraded", NOTICED_S, "the router to notice")
        gone_at, to_kill, num_turns = time.monotonic(), list(KILLED_AT_S), 0

        def kill_its_rank(session: str) -> None:
            pid = machines.rank_of(session)
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)

        while (gone_s := time.monotonic() - gone_at) < HOUR_S:
            session, kill_at_token = f"hour{num_turns}", -1
            if to_kill and gone_s > to_kill[0]:
                kill_at_token = 20
                to_kill.pop(0)
            assert await stream(client, session, kill_at_token, partial(kill_its_rank, session)) == calm
            assert "control plane unreachable since 20" in machines.health()["reason"]
            assert all(report["ok"] for report in machines.audits())
            assert machines.serving() == before - killed
            num_turns += 1
            await asyncio.sleep(PAUSE_S)
        command = [*HOLDFAST, "status", "--url", machines.url]
        status = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
        assert status.returncode == 0 and "degraded: control plane unreachable" in status.stderr
        await asyncio.to_thread(machines.head.start)
        await serve()  # both supervisors are dead, so somebody has to ask for others
        await until(lambda: machines.health() == {"status": "ok"}, BACK_S, "the GCS")
        await until(lambda: len(machines.serving()) == len(before), BACK_S, "the killed ranks' next incarnations")
        assert machines.serving() >= before - killed, "nothing is restarted that lives"
        await until(lambda: machines.num_supervisors() == 2, BACK_S, "two supervisors")
        assert await stream(client, "last") == calm
    assert len(killed) == len(KILLED_AT_S) and num_turns > HOUR_S / 60
    await machines.run("stop")
    assert not machines.serving()


async def test_routers_whose_machine_is_lost_move_to_another(in_long_runs: None, machines: Machines) -> None:
    await machines.serve(on=HEAD)
    ranks = machines.pids("RankActor")
    assert len(ranks) == 2 and not machines.pids("RouterActor") and machines.head.actors("RouterActor")
    async with AsyncOpenAI(base_url=f"{machines.url}/v1", api_key="none", max_retries=0) as client:
        calm = await stream(client, "calm")
        await until(lambda: len(machines.pids("SupervisorActor")) == 1, BACK_S, "the standby, on the other machine")
        with pytest.raises((APIError, httpx.HTTPError)):
            await stream(client, "cut", 20, machines.head.kill)
        await asyncio.to_thread(machines.head.start)
        await until(lambda: len(machines.pids("RouterActor")) == 1, BACK_S, "a router on the other machine")
        await until(lambda: is_served(machines.url), BACK_S, "it to serve")
        assert await stream(client, "last") == calm
    assert machines.pids("RankActor") == ranks, "nothing is restarted that lives"
    await machines.run("stop")
    assert not machines.serving()


def is_served(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return HTTP.get(f"{url}/health").is_success
    return False
