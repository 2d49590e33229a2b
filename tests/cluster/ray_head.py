"""A Ray head node of its own, as ``ray start --head`` starts one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster.ray_backend.nodes import prepare_environment
from tests.cluster.served import actors_under
from tests.ports import free_port

START_S = 60


@dataclass
class RayHead:
    """A Ray cluster of one node. ``process``: of ``ray start``."""

    address: str
    process: psutil.Process

    def actors(self, name: str = "") -> list[psutil.Process]:
        """The processes of actors whose class has that name, of all actors without it."""
        return actors_under(self.process, name)


@contextmanager
def ray_head(folder: Path, num_cpus: int = 2, **environment: str) -> Iterator[RayHead]:
    """A head node that runs meanwhile."""
    port = free_port()
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--block", f"--port={port}", f"--num-cpus={num_cpus}"]
    command += ["--include-dashboard=false", "--node-ip-address=127.0.0.1"]
    command += [f"--object-store-memory={128 * 1024 * 1024}"]
    prepare_environment()
    with (folder / "head.log").open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in (folder / "head.log").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "head.log").read_text()
            time.sleep(0.1)
        yield RayHead(f"127.0.0.1:{port}", psutil.Process(process.pid))
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
