"""A cluster started with ``holdfast serve``, and clients that read its streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI

from workers.store.folders import ARENA, MEMORY

HOLDFAST = [sys.executable, "-m", "cluster.cli.main"]
START_DEADLINE_S = 90.0
COMMAND_DEADLINE_S = 180.0
STOP_DEADLINE_S = 60.0
NUM_TOKENS = 250
JOURNAL = "j.db"
OVERLAP = "--no-disable-overlap-schedule"
"""Off by default on a CPU, and the loop that a GPU has."""
KV = ("--max-total-tokens", "16384")
"""A rank takes 0.4 s to get the memory of the default, four times as much."""
HTTP = httpx.Client(timeout=20, limits=httpx.Limits(max_keepalive_connections=0))
"""For requests without a client of their own: each client loads certificates for 30 ms, and waits ask often."""


class Served:
    """A cluster started by the command line."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.journal = folder / JOURNAL
        command = [
            *HOLDFAST,
            "serve",
            "--port",
            "0",
            "--grpc-port",
            "0",
            "--journal-path",
            str(self.journal),
            OVERLAP,
            *KV,
            *flags,
        ]
        self.log = (folder / "serve.log").open("w+")
        # A process group of its own, which a test may signal.
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.log, text=True, start_new_session=True
        )
        self.ready = self.next_ready()
        self.urls = [word for word in self.ready.split() if word.startswith("http://")]
        self.url = self.urls[0]
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        self.owner = psutil.Process(self.process.pid).children()[0]
        """The process that has started the Ray node; ``process`` is its guard."""

    def next_ready(self) -> str:
        """Wait until it serves: after the start, or after its Ray node was lost. Returns what it says then."""
        assert self.process.stdout is not None
        line = ""
        while not line.startswith("ready: "):
            line = self.process.stdout.readline()
            if not line:
                self.process.wait()
                self._close()
                raise AssertionError(f"the cluster did not start:\n{self.log_tail()}")
        return line

    def ask(self, *words: str) -> list[dict[str, Any]]:
        """A command's answer, as JSON. The deadline only ends what hangs: machines may be busy."""
        command = [*HOLDFAST, *words, "--json", "--url", self.url]
        out = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S)
        assert out.returncode == 0, f"{command}: {out.stderr}"
        answer: list[dict[str, Any]] = json.loads(out.stdout)
        return answer

    def workers(self) -> list[dict[str, Any]]:
        # Not with the command line, which takes longer to start than a stream takes to end.
        answer: list[dict[str, Any]] = HTTP.get(f"{self.url}/holdfast/workers").json()
        return answer

    def audits(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = HTTP.get(f"{self.url}/holdfast/audit").json()
        return answer

    def router(self) -> dict[str, Any]:
        answer: dict[str, Any] = HTTP.get(f"{self.url}/holdfast/router").json()
        return answer

    def worker_of(self, session: str) -> dict[str, Any]:
        """The worker that a session is pinned to."""
        sessions = HTTP.get(f"{self.url}/holdfast/sessions").json()
        pin = next(s["worker"] for s in sessions if s["session_id"] == session)
        return next(w for w in self.workers() if f"{w['worker_id']}@{w['incarnation']}" == pin)

    async def whole(self, num_workers: int = 2) -> None:
        """Returns when every worker serves."""
        deadline = time.monotonic() + START_DEADLINE_S
        while len(await asyncio.to_thread(self.workers)) < num_workers:
            assert time.monotonic() < deadline, f"a worker did not come back:\n{self.log_tail()}"
            await asyncio.sleep(0.1)

    def log_tail(self, num_bytes: int = 8000) -> str:
        """The end of its log, for the messages of failing tests."""
        return Path(self.log.name).read_bytes()[-num_bytes:].decode(errors="replace")

    def stop(self) -> int:
        """End it with SIGTERM, unless it has ended. Returns its exit code."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family += psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_DEADLINE_S)
        self._close()
        return code

    def actors(self, name: str) -> list[psutil.Process]:
        """The processes of actors whose class has that name."""
        return actors_under(psutil.Process(self.process.pid), name)

    def left(self) -> list[psutil.Process]:
        """Its processes that still run."""
        return [p for p in self.family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def abandon(self) -> None:
        """kill -9 every process."""
        self.process.kill()
        self.process.wait()
        for process in self.left():
            process.kill()
        self._close()

    def _close(self) -> None:
        self.log.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


def actors_under(parent: psutil.Process, name: str = "") -> list[psutil.Process]:
    """The processes of Ray's actors whose class has that name, of all actors without it."""
    found = []
    for process in parent.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if line and line[0].startswith(f"ray::{name}") and "Actor" in line[0]:
                found.append(process)
    return found


def leading_supervisor(journal: Path) -> int:
    """The pid of the supervisor that has the lease, or had it last."""
    with contextlib.closing(sqlite3.connect(journal)) as db:
        (holder,) = db.execute("SELECT holder FROM supervisor").fetchone()
    found = re.search(r"pid (\d+)", holder)
    assert found is not None, holder
    return int(found[1])


def shared_memory() -> set[str]:
    """Files in shared memory, except those that other tests have meanwhile: semaphores of multiprocessing, and arenas
    of stores that run (or start, and have none yet)."""
    names = {name for name in os.listdir(MEMORY) if not name.startswith("sem.mp-")}
    return {name for name in names if not (name.startswith("holdfast-") and _is_in_use(MEMORY / name))}


def _is_in_use(cluster: Path) -> bool:
    arenas = [path.name.removeprefix(ARENA) for path in cluster.glob(f"*/{ARENA}*")]
    return not arenas or any(psutil.pid_exists(int(pid)) for pid in arenas)


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    """A cluster, which must leave nothing behind."""
    before = shared_memory()
    cluster = Served(folder, *flags)
    try:
        yield cluster
    except BaseException:
        cluster.stop()  # the test has failed already
        raise
    assert cluster.stop() == 0
    assert not cluster.left(), "SIGTERM leaves no process"
    assert shared_memory() <= before, "nor shared memory"
    with pytest.raises(httpx.HTTPError):
        HTTP.get(f"{cluster.url}/health")


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
