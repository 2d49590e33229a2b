"""``holdfast serve`` on Ray with real processes and real ``kill -9``; nothing is left behind."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from openai import AsyncOpenAI

from tests.cluster.served import Served, serving, stream
from tests.waiting import until


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("serve")) as cluster:
        yield cluster


def test_ranks_and_routers_run_at_normal_niceness(served: Served) -> None:
    actors = [process for process in served.family if process.name().startswith("ray::R")]
    assert len(actors) >= 3, "two ranks and a router"
    assert {process.nice() for process in actors} == {psutil.Process().nice()}


def test_ray_starts_no_autoscaler_and_no_dashboard(served: Served) -> None:
    scripts = {Path(word).name for process in served.family for word in process.cmdline() if word.endswith(".py")}
    assert "log_monitor.py" in scripts, "Ray's processes are seen"
    assert not scripts & {"monitor.py", "dashboard.py"}


def test_a_router_carries_no_torch(served: Served) -> None:
    maps = psutil.Process(int(served.router()["pid"])).memory_maps()
    assert not any("torch" in mapped.path for mapped in maps)


def kill_worker_of(served: Served, session: str) -> dict:
    worker = served.worker_of(session)
    os.kill(int(worker["pid"]), signal.SIGKILL)
    return worker


async def test_kill_9_mid_stream_costs_a_pause_only(served: Served) -> None:
    killed: list[dict] = []
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        # Long turns: the kill strikes while the worker generates, however late this client reads.
        calm = await stream(client, "calm", num_tokens=1000)
        kill = lambda: killed.append(kill_worker_of(served, "storm"))  # noqa: E731
        storm = await stream(client, "storm", 20, kill, num_tokens=1000)
        assert storm == calm
        # The dead worker comes back as a new incarnation, and is whole.
        await served.whole()
        workers = served.ask("status")
        reborn = next(w for w in workers if w["worker_id"] == killed[0]["worker_id"])
        assert int(reborn["incarnation"]) > int(killed[0]["incarnation"]) and reborn["pid"] != killed[0]["pid"]
        epochs = {s["session_id"]: int(s["epoch"]) for s in served.ask("sessions")}
        assert epochs == {"calm": 1, "storm": 2}
        assert all(report["ok"] for report in served.ask("audit"))


async def test_audit_is_exact_on_a_busy_cluster(served: Served) -> None:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        num_running: list[int] = []

        async def turns(name: str) -> set[str]:
            """One turn after another until an audit has seen some run: a busy machine may do few audits."""
            texts = set()
            for n in itertools.count():
                texts.add(await stream(client, f"{name}-{n}", num_tokens=1000))
                if any(num_running):
                    break
            return texts

        busy = [asyncio.create_task(turns(f"busy-{i}")) for i in range(6)]
        while not all(task.done() for task in busy):
            reports = await asyncio.to_thread(served.audits)
            assert all(report["ok"] for report in reports), reports
            num_running.append(sum(rank["num_running"] for report in reports for rank in report["ranks"]))
        assert len(set.union(*[await task for task in busy])) == 1, "the same seed, the same text"


async def test_a_worker_that_is_stopped_is_replaced_and_its_process_ended(served: Served) -> None:
    await served.whole()
    stopped: list[dict] = []

    def stop() -> None:
        stopped.append(served.worker_of("stopped"))
        os.kill(int(stopped[0]["pid"]), signal.SIGSTOP)

    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        calm = await stream(client, "calm-2")
        assert await stream(client, "stopped", 20, stop) == calm
    await until(lambda: not psutil.pid_exists(int(stopped[0]["pid"])), 20, "the stopped process to be ended")
    await served.whole()
    assert all(report["ok"] for report in served.ask("audit"))
