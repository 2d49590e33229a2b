"""Ray's GCS dies or is stopped: turns go on and fail over, operators are told, and it is started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.served import COMMAND_DEADLINE_S, HOLDFAST, HTTP, START_DEADLINE_S, Served, serving
from tests.waiting import until

NOTICED_S = 30.0
REPLACED_S = 90.0
RAY_GIVES_UP_S = 75.0
"""By default every process of Ray ends when the GCS was gone for 60 s."""
WITHOUT_GCS = """
import json, os, time

from cluster.ray_backend.nodes import prepare_environment

prepare_environment()
import psutil
from cluster.config import Config
from cluster.ray_backend.connect import connect
from cluster.ray_backend.processes import find_actor
from holdfast.errors import HoldfastError

connect(Config())
(gcs,) = [child for child in psutil.Process().children() if child.name() == "gcs_server"]
gcs.kill()
began, used = time.monotonic(), time.process_time()
try:
    find_actor("supervisor-1")
except HoldfastError as error:
    seconds = {"s": time.monotonic() - began, "cpu_s": time.process_time() - used}
    print(json.dumps({"raised": str(error)} | seconds), flush=True)
for child in psutil.Process().children(recursive=True):
    child.kill()
os._exit(0)  # Ray's own end asks the GCS
"""
"""A client of Ray asks for an actor that it does not know yet."""
BODY = {"prompt": "Return the list of", "max_tokens": 400, "seed": 1, "temperature": 0.8, "ignore_eos": True}


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("gcs")) as cluster:
        yield cluster


@pytest.fixture
def served_with_own_storage(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    """A cluster whose GCS is its user's affair, and is not started again."""
    monkeypatch.setenv("RAY_gcs_storage", "memory")
    with serving(tmp_path_factory.mktemp("gcs")) as cluster:
        yield cluster


def gcs_of(served: Served) -> psutil.Process:
    children = psutil.Process(served.process.pid).children(recursive=True)
    (gcs,) = [process for process in children if process.name() == "gcs_server"]
    return gcs


def health(served: Served) -> dict[str, Any]:
    answer = HTTP.get(f"{served.url}/health")
    assert answer.status_code == 200
    return dict(answer.json())


async def turn(http: httpx.AsyncClient, session: str, under_way: asyncio.Event | None = None) -> str:
    """A turn's text; its first token sets ``under_way``."""
    text = ""
    headers = {"X-Session-ID": session}
    async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}, headers=headers) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"][0]["text"]
                if under_way is not None:
                    under_way.set()
    return text


async def test_a_killed_gcs_costs_no_turn_and_no_failover(served_with_own_storage: Served, long: bool) -> None:
    served = served_with_own_storage
    async with httpx.AsyncClient(base_url=served.url, timeout=90) as http:
        calm = await turn(http, "calm")
        began = [asyncio.Event() for _ in range(4)]
        turns = [asyncio.create_task(turn(http, f"s{i}", event)) for i, event in enumerate(began)]
        await asyncio.gather(*(event.wait() for event in began))
        gcs_of(served).kill()
        gone_at = time.monotonic()
        assert [await each for each in turns] == [calm] * 4
        await until(lambda: health(served)["status"] == "degraded", NOTICED_S, "the router to notice")
        assert "control plane unreachable since 20" in health(served)["reason"]
        command = [*HOLDFAST, "status", "--url", served.url]
        status = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert status.returncode == 0 and "worker-0" in status.stdout
        assert "degraded: control plane unreachable" in status.stderr
        while long and time.monotonic() < gone_at + RAY_GIVES_UP_S:
            await asyncio.sleep(1.0)
            assert served.process.poll() is None
        event = asyncio.Event()
        last = asyncio.create_task(turn(http, "last", event))
        await event.wait()
        os.kill(int(served.worker_of("last")["pid"]), signal.SIGKILL)
        assert await last == calm, "its worker is not started again, and its session goes on"
        assert all(report["ok"] for report in served.audits())


def test_a_client_without_a_gcs_raises_our_error_and_takes_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_gcs_server_request_timeout_seconds", "5")  # by default 60
    command = [sys.executable, "-c", WITHOUT_GCS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["raised"].startswith("nobody knows whether supervisor-1 runs")
    assert found["cpu_s"] < found["s"] / 4, "Ray's listeners wait too"


def is_replaced(served: Served, gcs: psutil.Process) -> bool:
    with contextlib.suppress(ValueError, psutil.NoSuchProcess):  # while there is none, or both
        return gcs_of(served).pid != gcs.pid
    return False


async def test_a_killed_gcs_comes_back_and_what_dies_is_started_again(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.url, timeout=90) as http:
        calm = await turn(http, "calm")
        for session in ("first", "second"):
            gcs, began = gcs_of(served), asyncio.Event()
            live = asyncio.create_task(turn(http, session, began))
            await began.wait()
            gcs.kill()
            killed = served.worker_of(session)
            os.kill(int(killed["pid"]), signal.SIGKILL)
            assert await live == calm, "nothing waits for the GCS"
            await until(lambda gcs=gcs: is_replaced(served, gcs), NOTICED_S, "another GCS")

            def is_back(killed: dict[str, Any] = killed) -> bool:
                return any(
                    w["worker_id"] == killed["worker_id"] and w["pid"] != killed["pid"] for w in served.workers()
                )

            await until(is_back, START_DEADLINE_S, "the worker's next incarnation")
        await until(lambda: health(served) == {"status": "ok"}, NOTICED_S, "the router to notice")
    assert all(report["ok"] for report in served.audits())


async def test_a_stopped_gcs_is_noticed_and_replaced(served: Served) -> None:
    gcs = gcs_of(served)
    assert health(served) == {"status": "ok"}
    gcs.suspend()
    await until(lambda: health(served)["status"] == "degraded", NOTICED_S, "the router to notice")
    async with httpx.AsyncClient(base_url=served.url, timeout=90) as http:
        assert await turn(http, "s")
    await until(lambda: is_replaced(served, gcs), REPLACED_S, "another GCS")
    await until(lambda: health(served) == {"status": "ok"}, NOTICED_S, "the router to notice")
