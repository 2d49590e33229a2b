"""The real thing: ``holdfast serve`` on Ray, real processes, real ``kill -9``, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from openai import AsyncOpenAI

HOLDFAST = [sys.executable, "-m", "cluster.cli"]
START_DEADLINE_S = 90.0
NUM_TOKENS = 250


class Served:
    """A cluster started by the command line."""

    def __init__(self, folder: Path) -> None:
        command = [*HOLDFAST, "serve", "--port", "0", "--grpc-port", "0", "--journal-path", str(folder / "j.db")]
        self.log = (folder / "serve.log").open("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout is not None
        line = ""
        while not line.startswith("ready: "):
            line = self.process.stdout.readline()
            assert line or self.process.poll() is None, Path(self.log.name).read_text()
        self.url = line.split()[1]
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def ask(self, *words: str) -> list[dict]:
        out = subprocess.run(
            [*HOLDFAST, *words, "--json", "--url", self.url], capture_output=True, check=True, text=True, timeout=30
        )
        return json.loads(out.stdout)

    def stop(self) -> int:
        self.family += psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self.log.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    before = set(os.listdir("/dev/shm"))
    cluster = Served(tmp_path_factory.mktemp("serve"))
    yield cluster
    assert cluster.stop() == 0
    deadline = time.monotonic() + 20
    while (
        left := [p for p in cluster.family if p.is_running() and p.status() != "zombie"]
    ) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "SIGTERM leaves no process"
    assert set(os.listdir("/dev/shm")) <= before, "nor shared memory"
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{cluster.url}/health")


async def stream(client: AsyncOpenAI, session: str, on_token: int = -1, act=None) -> str:
    chunks = await client.completions.create(
        model="holdfast-tiny",
        prompt="Return the list of",
        temperature=0.8,
        seed=3,
        max_tokens=NUM_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True, "top_k": 40},
        extra_headers={"X-Session-ID": session},
    )
    text, count = "", 0
    async for chunk in chunks:
        text += chunk.choices[0].text
        count += 1
        if act is not None and count == on_token:
            act()
    assert count == NUM_TOKENS, "every token came once"
    return text


def kill_worker_of(served: Served, session: str) -> dict:
    # Not by the command line: the stream would be over before it has started.
    sessions, workers = (httpx.get(f"{served.url}/holdfast/{what}").json() for what in ("sessions", "workers"))
    pin = next(s["worker"] for s in sessions if s["session_id"] == session)
    worker = next(w for w in workers if w["worker_id"] == pin.split("@")[0])
    os.kill(int(worker["pid"]), signal.SIGKILL)
    return worker


async def test_kill_9_mid_stream_costs_a_pause_only(served: Served) -> None:
    killed: list[dict] = []
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        calm = await stream(client, "calm")
        storm = await stream(client, "storm", 20, lambda: killed.append(kill_worker_of(served, "storm")))
        assert storm == calm
        # The dead worker comes back as a new incarnation, and is whole.
        deadline = time.monotonic() + START_DEADLINE_S
        while len(workers := served.ask("status")) < 2:
            assert time.monotonic() < deadline, "the worker did not come back"
            await asyncio.sleep(0.2)
        reborn = next(w for w in workers if w["worker_id"] == killed[0]["worker_id"])
        assert int(reborn["incarnation"]) > int(killed[0]["incarnation"]) and reborn["pid"] != killed[0]["pid"]
        epochs = {s["session_id"]: int(s["epoch"]) for s in served.ask("sessions")}
        assert epochs == {"calm": 1, "storm": 2}
        assert all(report["ok"] for report in served.ask("audit"))


async def test_audit_is_exact_on_a_busy_cluster(served: Served) -> None:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        turns = [asyncio.create_task(stream(client, f"busy-{i}")) for i in range(6)]
        running = 0
        while not all(turn.done() for turn in turns):
            reports = await asyncio.to_thread(served.ask, "audit")
            assert all(report["ok"] for report in reports), reports
            running = max(running, sum(rank["num_running"] for report in reports for rank in report["ranks"]))
        assert running > 0, "it was busy"
        assert len({await turn for turn in turns}) == 1, "the same seed, the same text"
