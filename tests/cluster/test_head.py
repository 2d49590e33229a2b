"""The head node of a cluster dies, GCS and all, and comes back with the state that its GCS keeps in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pytest
from openai import APIError, AsyncOpenAI

from tests.cluster.ray_head import RayHead, kill, ray_head, started_node
from tests.cluster.served import COMMAND_DEADLINE_S, HOLDFAST, HTTP, actors_under, stream
from tests.ports import free_port
from tests.redis_server import redis_server
from tests.waiting import until

HEAD, NODE = "127.0.0.2", "127.0.0.1"
NODE_S = 60.0
NOTICED_S = 30.0
BACK_S = 120.0


class Machines:
    """A head with nothing but Ray, and a node that everything of ours runs on."""

    def __init__(self, head: RayHead, node: psutil.Process, journal_url: str) -> None:
        self.head, self._node = head, node
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._flags = ("--port", str(port), "--grpc-port", "0", "--journal-url", journal_url, "--device", "cpu")

    async def run(self, command: str, *words: str, on: str = NODE) -> None:
        # The GCS answers at both addresses. A command takes the raylet at the one it is given for its own machine's.
        address = self.head.address.replace(HEAD, on)
        line = [*HOLDFAST, command, "--address", address, *words]
        done = await asyncio.to_thread(subprocess.run, line, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
        assert done.returncode == 0, done.stderr

    async def serve(self, on: str) -> None:
        """Start the cluster from that machine, which its routers run on."""
        await self.run("serve", "--detach", *self._flags, on=on)

    def pids(self, name: str) -> set[int]:
        """Of actors on the node."""
        return {process.pid for process in actors_under(self._node, name)}

    def serving(self) -> set[int]:
        return self.pids("RouterActor") | self.pids("RankActor")

    def num_supervisors(self) -> int:
        return len(self.pids("SupervisorActor")) + len(self.head.actors("SupervisorActor"))

    def health(self) -> dict[str, Any]:
        return dict(HTTP.get(f"{self.url}/health").json())


@contextmanager
def joined_node(address: str, folder: Path) -> Iterator[psutil.Process]:
    options = ["--num-cpus", "2", "--temp-dir", str(folder), "--node-ip-address", NODE]
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
