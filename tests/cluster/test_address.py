"""``holdfast serve --address``: joining a Ray cluster that asks for a token."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.served import HOLDFAST, Served
from tests.ports import free_port
from tests.waiting import until

TOKEN = "0123456789abcdef" * 4
START_S = 60


@pytest.fixture
def head(tmp_path: Path) -> Iterator[str]:
    """The address of a Ray head node that asks for ``TOKEN``."""
    port = free_port()
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--block", f"--port={port}", "--num-cpus=2", "--include-dashboard=false"]
    command += ["--node-ip-address=127.0.0.1", f"--object-store-memory={128 * 1024 * 1024}"]
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    with (tmp_path / "head.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in (tmp_path / "head.log").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "head.log").read_text()
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for child in psutil.wait_procs(children, timeout=10)[1]:
            child.kill()


async def test_a_token_is_found_and_its_absence_is_explained(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    flags = ("--workers", "1", "--address", head)
    served = Served(tmp_path, *flags)
    try:
        await until(lambda: len(served.workers()) == 1, START_S, "the worker")
        assert served.stop() == 0
    finally:
        served.abandon()
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))  # whose token would be found
    command = [*HOLDFAST, "serve", *flags, "--journal-path", str(tmp_path / "j.db")]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"holdfast: address: the Ray cluster at {head} refuses to connect; "), done.stderr
    assert "set RAY_AUTH_MODE=token" in last
