"""Ray nodes of their own, as ``ray start`` starts them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from cluster.ray_backend.nodes import prepare_environment
from tests.cluster.served import actors_under
from tests.ports import free_port

START_S = 180.0
STARTS = 5
"""On a busy machine: ``ray start`` itself gives up after 30 s."""


class RayHead:
    """The head of a Ray cluster. ``process``: of ``ray start``. ``host``: its address on this machine.

    ``temp_dir``: for Ray's files; a short path, as they have sockets. By default all nodes of this machine share one.
    """

    def __init__(
        self, folder: Path, num_cpus: int, host: str, temp_dir: Path | None, environment: dict[str, str]
    ) -> None:
        port = free_port()
        self.address = f"{host}:{port}"
        ray = str(Path(sys.executable).with_name("ray"))
        self._command = [ray, "start", "--head", "--block", f"--port={port}", f"--num-cpus={num_cpus}"]
        self._command += ["--include-dashboard=false", "--no-monitor", "--include-log-monitor=false"]
        self._command += [f"--node-ip-address={host}"]
        self._command += [f"--object-store-memory={128 * 1024 * 1024}"]
        if temp_dir is not None:
            self._command.append(f"--temp-dir={temp_dir}")
        self._log, self._temp_dir, self._environment = folder / "head.log", temp_dir, environment
        prepare_environment()

    def start(self) -> None:
        """Returns when it runs."""
        self.process = started_node(self._command, self._log, self._environment)

    def kill(self) -> None:
        """As when its machine loses power: every process of it, at once."""
        kill([*self.process.children(recursive=True), self.process])
        if self._temp_dir is not None:  # else nodes that it had would be taken for it, as they are on this machine
            (self._temp_dir / "ray_current_cluster").unlink()

    def actors(self, name: str = "") -> list[psutil.Process]:
        """The processes of its node's actors whose class has that name, of all actors without it."""
        return actors_under(self.process, name)

    def stop(self) -> None:
        if self.process.poll() is not None:
            return  # it was killed
        children = self.process.children(recursive=True)
        self.process.terminate()
        psutil.wait_procs([self.process], timeout=20)
        psutil.wait_procs(children, timeout=10)
        kill([self.process, *children])


def started_node(command: list[str], log: Path, environment: dict[str, str]) -> psutil.Popen:
    """The process of ``ray start``, or of a command that calls it, when its node runs."""
    for _ in range(STARTS):
        with log.open("w") as out:
            given = os.environ | environment
            process = psutil.Popen(command, env=given, stdout=out, stderr=out, start_new_session=True)
        deadline, children = time.monotonic() + START_S, list[psutil.Process]()
        while process.poll() is None and time.monotonic() < deadline:
            if "Ray runtime started" in log.read_text():
                return process
            with contextlib.suppress(psutil.NoSuchProcess):
                children = process.children(recursive=True) or children
            time.sleep(0.1)
        kill([process, *children])
    raise AssertionError(log.read_text())


def kill(processes: list[psutil.Process]) -> None:
    """Returns when they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes)


@contextmanager
def ray_head(
    folder: Path, num_cpus: int = 2, host: str = "127.0.0.1", temp_dir: Path | None = None, **environment: str
) -> Iterator[RayHead]:
    """A head node that runs meanwhile."""
    head = RayHead(folder, num_cpus, host, temp_dir, environment)
    head.start()
    try:
        yield head
    finally:
        head.stop()
