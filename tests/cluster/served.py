"""A cluster that the command line started, and clients that read streams of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [
            *HOLDFAST,
            "serve",
            "--port",
            "0",
            "--grpc-port",
            "0",
            "--journal-path",
            str(folder / "j.db"),
            *flags,
        ]
        self.log = (folder / "serve.log").open("w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout is not None
        line = ""
        while not line.startswith("ready: "):
            line = self.process.stdout.readline()
            if not line:
                self.process.wait()
                self._close()
                raise AssertionError(f"it did not start:\n{self.log_tail()}")
        self.urls = [word for word in line.split() if word.startswith("http://")]
        self.url = self.urls[0]
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def ask(self, *words: str) -> list[dict]:
        out = subprocess.run(
            [*HOLDFAST, *words, "--json", "--url", self.url], capture_output=True, check=True, text=True, timeout=30
        )
        return json.loads(out.stdout)

    def workers(self) -> list[dict]:
        # Not by the command line: a stream would be over before it has started.
        return httpx.get(f"{self.url}/holdfast/workers", timeout=20).json()

    def router(self) -> dict:
        return httpx.get(f"{self.url}/holdfast/router", timeout=20).json()

    def worker_of(self, session: str) -> dict:
        """The worker that a session is pinned to."""
        sessions = httpx.get(f"{self.url}/holdfast/sessions", timeout=20).json()
        pin = next(s["worker"] for s in sessions if s["session_id"] == session)
        return next(w for w in self.workers() if f"{w['worker_id']}@{w['incarnation']}" == pin)

    async def whole(self, num_workers: int = 2) -> None:
        """Returns when every worker serves."""
        deadline = time.monotonic() + START_DEADLINE_S
        while len(await asyncio.to_thread(self.workers)) < num_workers:
            assert time.monotonic() < deadline, f"a worker did not come back:\n{self.log_tail()}"
            await asyncio.sleep(0.1)

    def log_tail(self, num_bytes: int = 8000) -> str:
        """The end of what it logged, for messages of what went wrong."""
        return Path(self.log.name).read_bytes()[-num_bytes:].decode(errors="replace")

    def stop(self) -> int:
        self.family += psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._close()
        return code

    def left(self) -> list[psutil.Process]:
        """Which of its processes are still there."""
        return [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def abandon(self) -> None:
        """kill -9 of whatever is there."""
        self.process.kill()
        self.process.wait()
        for process in self.left():
            process.kill()
        self._close()

    def _close(self) -> None:
        self.log.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


def shared_memory() -> set[str]:
    """Files in shared memory; but semaphores of multiprocessing, which the simulator's tests make beside these."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    """A cluster; at the end it must leave nothing behind."""
    before = shared_memory()
    cluster = Served(folder, *flags)
    try:
        yield cluster
    except BaseException:
        cluster.stop()  # whatever comes of it: the test has failed already
        raise
    assert cluster.stop() == 0
    deadline = time.monotonic() + 20
    while cluster.left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not cluster.left(), "SIGTERM leaves no process"
    assert shared_memory() <= before, "nor shared memory"
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{cluster.url}/health")


async def stream(
    client: AsyncOpenAI,
    session: str,
    on_token: int = -1,
    act: Callable[[], object] = lambda: None,
    *,
    prompt: str = "Return the list of",
    num_tokens: int = NUM_TOKENS,
) -> str:
    """Read a seeded turn's stream; ``act`` when token ``on_token`` is there. Every token comes once."""
    chunks = await client.completions.create(
        model="holdfast-tiny",
        prompt=prompt,
        temperature=0.8,
        seed=3,
        max_tokens=num_tokens,
        stream=True,
        extra_body={"ignore_eos": True, "top_k": 40},
        extra_headers={"X-Session-ID": session},
    )
    text, count = "", 0
    async for chunk in chunks:
        text += chunk.choices[0].text
        count += 1
        if count == on_token:
            act()
    assert count == num_tokens, "every token came once"
    return text
