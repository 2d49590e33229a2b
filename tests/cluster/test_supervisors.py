"""``holdfast serve --address --detach``: one supervisor leads, another stands by, and any of them may die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI

from cluster.authority import Authority
from cluster.leadership import SUPERVISOR_LEASE_S
from tests.cluster.ray_head import RayHead, ray_head
from tests.cluster.served import (
    COMMAND_DEADLINE_S,
    HOLDFAST,
    HTTP,
    KV,
    OVERLAP,
    START_DEADLINE_S,
    leading_supervisor,
    shared_memory,
    stream,
)
from tests.ports import free_port
from tests.waiting import until
from workers.config import BUNDLED_MODEL

TAKE_OVER_S = 60.0
GONE_S = 30.0
LATE_S = SUPERVISOR_LEASE_S
START_UNTOLD = """
import asyncio, sys
from cluster.cli.supervised import joined
from cluster.config import Config

async def start():
    async with joined(Config(address=sys.argv[1])):
        from cluster.ray_backend.processes import actor_options
        from cluster.ray_backend.supervisor_actor import SLOTS, SupervisorActor
        options = actor_options(SLOTS[0], detached=True)
        await SupervisorActor.options(num_cpus=0, **options).remote().process.remote()

asyncio.run(start())
"""
"""As a supervisor does that dies as soon as it has started another."""


class Detached:
    """A cluster on a Ray cluster of its own, and the commands that start, find and stop it."""

    def __init__(self, folder: Path, head: RayHead) -> None:
        self.head, self._journal = head, folder / "j.db"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._flags = ("--port", str(port), "--grpc-port", "0", "--journal-path", str(self._journal), OVERLAP, *KV)
        self._flags += ("--hicache-size", "0.05")

    async def run(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        line = [*HOLDFAST, command, "--address", self.head.address, *words]
        return await asyncio.to_thread(subprocess.run, line, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)

    async def serve(self, *more: str) -> subprocess.CompletedProcess[str]:
        return await self.run("serve", "--detach", *self._flags, *more)

    @asynccontextmanager
    async def serving(self, stderr: int | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
        """``holdfast serve`` without ``--detach``, when it is ready. It has ended afterwards."""
        command = [*HOLDFAST, "serve", "--address", self.head.address, *self._flags]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=stderr)
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), START_DEADLINE_S)
            assert line.startswith(f"ready: {self.url} ".encode()), line
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def workers(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = HTTP.get(f"{self.url}/holdfast/workers").json()
        return answer

    def router(self) -> dict[str, Any]:
        answer: dict[str, Any] = HTTP.get(f"{self.url}/holdfast/router").json()
        return answer

    def num_pages(self) -> set[int]:
        """Of the workers' pools, which are equal in tokens."""
        return {int(group["total"]) for worker in self.workers() for group in worker["groups"]}

    def pids(self) -> set[int]:
        """Of all that serves: routers, ranks and KV stores."""
        return {
            process.pid for name in ("RouterActor", "RankActor", "KVStoreActor") for process in self.head.actors(name)
        }

    def leader(self) -> int:
        """The pid of the supervisor that has the lease, or had it last."""
        return leading_supervisor(self._journal)

    def num_standing(self) -> int:
        """The supervisors that stand for the lease: one that was just started does not know of its cluster yet."""
        num = 0
        for process in self.head.actors("SupervisorActor"):
            with contextlib.suppress(psutil.Error):
                num += any(file.path == str(self._journal) for file in process.open_files())
        return num

    async def led_by_another(self, than: int) -> None:
        def is_led() -> bool:
            return self.leader() != than and self.num_standing() == 2

        await until(is_led, TAKE_OVER_S, "another supervisor to lead, and one to stand by")


@contextlib.contextmanager
def terminal() -> Iterator[tuple[int, list[str]]]:
    """One for a process to write to, and what it has written. In a running event loop, which reads it."""
    ours, its = os.openpty()
    shown, loop = list[str](), asyncio.get_running_loop()
    loop.add_reader(ours, lambda: shown.append(os.read(ours, 65536).decode(errors="replace")))
    try:
        yield its, shown
    finally:
        loop.remove_reader(ours)
        os.close(its)
        os.close(ours)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Detached]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    before = shared_memory()
    with ray_head(tmp_path, num_cpus=2) as head:
        yield Detached(tmp_path, head)
    assert shared_memory() <= before


async def test_supervisors_die_hang_and_wake_late_and_nothing_else_is_restarted(cluster: Detached) -> None:
    done = await cluster.serve()
    assert done.returncode == 0 and f"ready: {cluster.url} " in done.stdout, done.stderr
    started = cluster.pids()
    assert len(started) == 4, "a router, two ranks, a KV store"
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        calm = await stream(client, "calm")
        await _a_killed_leader_costs_nothing(cluster, client, calm)
        assert cluster.pids() == started
        await _a_stopped_leader_is_replaced_and_wakes_up_late(cluster)
        assert await stream(client, "last") == calm
    done = await cluster.serve("--workers", "1")
    assert done.returncode == 1
    assert "workers: the cluster that runs" in done.stderr and "holdfast stop" in done.stderr
    done = await cluster.run("stop")
    assert done.returncode == 0, done.stderr
    assert not cluster.head.actors()
    done = await cluster.run("stop")
    assert done.returncode == 1 and "no cluster of Holdfast runs" in done.stderr


async def test_a_serve_that_waits_is_killed_attaches_again_and_replaces_all_supervisors(cluster: Detached) -> None:
    async with cluster.serving() as first:
        started = cluster.pids()
        first.kill()
        assert await first.wait() == -signal.SIGKILL
        async with cluster.serving() as second:
            assert cluster.pids() == started, "it has attached"
            await until(lambda: len(cluster.head.actors("SupervisorActor")) == 2, TAKE_OVER_S, "two supervisors")
            before = cluster.head.actors("SupervisorActor")
            for process in before:
                process.kill()
            async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
                text = await stream(client, "without any")
                await until(lambda: cluster.leader() not in {p.pid for p in before}, TAKE_OVER_S, "another supervisor")
                await asyncio.sleep(LATE_S)
                assert cluster.pids() == started, "which keeps all that runs"
                assert await stream(client, "led again") == text
            second.terminate()
            assert await second.wait() == 0
    assert not cluster.head.actors()


async def test_a_serve_that_waits_shows_its_start_and_ends_with_its_cluster(cluster: Detached) -> None:
    with terminal() as (stderr, shown):
        async with cluster.serving(stderr) as process:
            for rank in ("worker-0/0", "worker-1/0"):
                assert f"{rank} loads layers " in "".join(shown) and "4/4" in "".join(shown), shown
            assert (await cluster.run("stop")).returncode == 0
            assert await asyncio.wait_for(process.wait(), GONE_S) == 0
    assert not cluster.head.actors(), "nothing was started again"


async def test_an_upgrade_to_another_page_size_and_back_costs_no_token(cluster: Detached) -> None:
    assert (await cluster.serve()).returncode == 0
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        calm, done = await stream(client, "calm"), asyncio.Event()

        async def keep_asking(name: str) -> int:
            num_turns = 0
            while not done.is_set():
                assert await stream(client, f"{name}-{num_turns}") == calm
                num_turns += 1
            return num_turns

        (of_16,) = cluster.num_pages()
        load = [asyncio.create_task(keep_asking(name)) for name in ("a", "b")]
        try:
            for page_size in (4, 16):
                before = {worker["pid"] for worker in cluster.workers()}
                report = await cluster.run("upgrade", "--page-size", str(page_size), "--json")
                assert report.returncode == 0, report.stderr
                assert cluster.num_pages() == {of_16 * 16 // page_size}
                assert not before & {worker["pid"] for worker in cluster.workers()}
        finally:
            done.set()
        assert min(await asyncio.gather(*load)) > 1
        leader = psutil.Process(cluster.leader())
        started = cluster.pids()
        leader.kill()
        await cluster.led_by_another(leader.pid)
        assert cluster.pids() == started, "the standby knows the settings"
    for flags, message in (
        (("--port", "1"), "port: cannot change while the cluster runs"),
        (("--page-size", "3"), "page_size: must be a power of two"),
    ):
        refused = await cluster.run("upgrade", *flags)
        assert refused.returncode == 1 and message in refused.stderr, refused.stderr
    assert cluster.pids() == started
    assert (await cluster.run("stop")).returncode == 0


async def test_a_leader_that_dies_while_it_starts_the_cluster_is_replaced(cluster: Detached) -> None:
    starting = asyncio.create_task(cluster.serve())

    def is_starting() -> bool:
        return cluster.num_standing() == 2 and len(cluster.head.actors("RankActor")) == 2

    await until(is_starting, START_DEADLINE_S, "its processes")
    psutil.Process(cluster.leader()).kill()
    done = await starting
    assert done.returncode == 0 and f"ready: {cluster.url} " in done.stdout, done.stderr
    assert len(cluster.workers()) == 2
    await until(lambda: cluster.num_standing() == 2, TAKE_OVER_S, "one to stand by again")
    for process in psutil.Process(cluster.leader()), cluster.head.actors("RankActor")[0]:
        process.kill()
    again = await cluster.serve()
    assert again.returncode == 0, again.stderr
    assert len(cluster.workers()) == 2, "ready means all of it"
    assert (await cluster.run("stop")).returncode == 0


async def test_a_supervisor_whose_starter_died_before_it_said_what_to_lead_ends_itself(cluster: Detached) -> None:
    assert (await cluster.serve()).returncode == 0
    for process in cluster.head.actors("SupervisorActor"):
        process.kill()
    untold = [sys.executable, "-c", START_UNTOLD, cluster.head.address]
    done = await asyncio.to_thread(subprocess.run, untold, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
    assert done.returncode == 0, done.stderr
    (orphan,) = cluster.head.actors("SupervisorActor")
    again = await cluster.serve()
    assert again.returncode == 0, again.stderr
    assert orphan not in cluster.head.actors("SupervisorActor") and len(cluster.workers()) == 2
    assert (await cluster.run("stop")).returncode == 0


async def test_with_an_authority_of_one_s_own_all_supervisors_may_be_lost(
    cluster: Detached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_ADMIN_API_KEYS", "secret")
    sealed = Authority(name="ours").sealed()
    (tmp_path / "ca.pem").write_bytes(sealed.certificate)
    (tmp_path / "ca.key").write_bytes(sealed.key)
    ours = ("--tls-ca", "ca.pem", "--tls-cert", "ca.pem", "--tls-key", "ca.key")
    flags = [str(tmp_path / word) if word.startswith("ca.") else word for word in ours]
    assert (await cluster.serve(*flags)).returncode == 0
    started = cluster.pids()
    await until(lambda: len(cluster.head.actors("SupervisorActor")) == 2, TAKE_OVER_S, "two supervisors")
    for supervisor in cluster.head.actors("SupervisorActor"):
        supervisor.kill()
    again = await cluster.serve(*flags)
    assert again.returncode == 0, again.stderr
    await asyncio.sleep(LATE_S)
    assert cluster.pids() == started
    refused = await cluster.run("upgrade", "--page-size", "4")
    assert refused.returncode == 1 and "answered 401" in refused.stderr, refused.stderr
    again = await cluster.serve(*flags)
    assert again.returncode == 0, f"the settings have changed: {again.stderr}"
    assert (await cluster.run("stop")).returncode == 0


async def test_what_cannot_start_is_said_and_leaves_nothing_and_force_ends_what_nobody_leads(
    cluster: Detached, tmp_path: Path
) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(BUNDLED_MODEL, torn)
    for weights in torn.glob("*.safetensors"):
        weights.write_bytes(weights.read_bytes()[:1000])
    failed = await cluster.serve("--model", str(torn))
    assert failed.returncode == 1 and "\nholdfast: model.safetensors" in f"\n{failed.stderr}", failed.stderr
    assert not cluster.head.actors()
    alone = [*HOLDFAST, "serve", "--detach"]
    done = await asyncio.to_thread(subprocess.run, alone, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
    assert done.returncode == 1 and "detach: needs the address" in done.stderr
    assert (await cluster.serve()).returncode == 0
    for supervisor in cluster.head.actors("SupervisorActor"):
        supervisor.suspend()
    forced = await cluster.run("stop", "--force")
    assert forced.returncode == 0, forced.stderr
    await until(lambda: len(cluster.head.actors()) <= 2, GONE_S, "all but what is stopped to end")
    for supervisor in cluster.head.actors():
        supervisor.kill()


async def _a_killed_leader_costs_nothing(cluster: Detached, client: AsyncOpenAI, calm: str) -> None:
    leader = psutil.Process(cluster.leader())
    assert await stream(client, "under a kill", 20, leader.kill) == calm
    await cluster.led_by_another(leader.pid)


async def _a_stopped_leader_is_replaced_and_wakes_up_late(cluster: Detached) -> None:
    leader, worker, router = psutil.Process(cluster.leader()), cluster.workers()[0], cluster.router()
    leader.suspend()
    try:
        psutil.Process(int(worker["pid"])).kill()
        psutil.Process(int(router["pid"])).kill()

        def are_back() -> bool:
            try:
                names = {each["worker_id"]: each["pid"] for each in cluster.workers()}
            except httpx.HTTPError:
                return False
            return len(names) == 2 and names[worker["worker_id"]] != worker["pid"]

        await until(are_back, START_DEADLINE_S, "the standby to start the worker and the router again")
        serving = cluster.pids()
    finally:
        leader.resume()
    await asyncio.sleep(LATE_S)
    assert cluster.pids() == serving, "it does nothing"
    assert cluster.leader() != leader.pid
    assert cluster.router()["grpc"] == router["grpc"], "a port that was chosen stays"
