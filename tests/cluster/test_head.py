"""The head node of a cluster dies, GCS and all, and comes back with the state that its GCS keeps in Redis."""

from __future__ import annotations

import asyncio
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
from openai import AsyncOpenAI

from tests.cluster.ray_head import RayHead, ray_head
from tests.cluster.served import COMMAND_DEADLINE_S, HOLDFAST, actors_under, stream
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

    async def run(self, command: str, *words: str) -> None:
        # At this address a command takes the node's raylet for its own, not the head's.
        address = self.head.address.replace(HEAD, NODE)
        line = [*HOLDFAST, command, "--address", address, *words]
        done = await asyncio.to_thread(subprocess.run, line, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
        assert done.returncode == 0, done.stderr

    async def serve(self) -> None:
        await self.run("serve", "--detach", *self._flags)

    def pids(self, name: str) -> set[int]:
        """Of actors on the node."""
        return {process.pid for process in actors_under(self._node, name)}

    def serving(self) -> set[int]:
        return self.pids("RouterActor") | self.pids("RankActor")

    def health(self) -> dict[str, Any]:
        return dict(httpx.get(f"{self.url}/health", timeout=20).json())


@contextmanager
def joined_node(address: str, folder: Path) -> Iterator[psutil.Process]:
    options = ["--num-cpus", "2", "--temp-dir", str(folder), "--node-ip-address", NODE]
    with (folder / "node.log").open("w") as log:
        node = psutil.Popen([*HOLDFAST, "join", address, *options], stdout=log, stderr=log)
    try:
        yield node
    finally:
        processes = [node, *node.children(recursive=True)]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes)


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
    await machines.serve()
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
        await until(lambda: len(machines.pids("SupervisorActor")) == 2, BACK_S, "two supervisors")
        assert await stream(client, "last") == calm
    await machines.run("stop")
    assert not machines.serving()
