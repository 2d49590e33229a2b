"""A Ray head node of its own, as ``ray start --head`` starts one."""

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

START_S = 180
"""For a busy machine."""


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
        self._command += ["--include-dashboard=false", f"--node-ip-address={host}"]
        self._command += [f"--object-store-memory={128 * 1024 * 1024}"]
        if temp_dir is not None:
            self._command.append(f"--temp-dir={temp_dir}")
        self._log, self._temp_dir, self._environment = folder / "head.log", temp_dir, environment
        prepare_environment()

    def start(self) -> None:
        """Returns when it runs."""
        with self._log.open("w") as log:
            environment = os.environ | self._environment
            self.process = psutil.Popen(self._command, env=environment, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_S
        while "Ray runtime started" not in self._log.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        """As when its machine loses power: every process of it, at once."""
        processes = [*self.process.children(recursive=True), self.process]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes)
        if self._temp_dir is not None:  # else nodes that it had would be taken for it, as they are on this machine
            (self._temp_dir / "ray_current_cluster").unlink()

    def actors(self, name: str = "") -> list[psutil.Process]:
        """The processes of its node's actors whose class has that name, of all actors without it."""
        return actors_under(self.process, name)

    def stop(self) -> None:
        children = self.process.children(recursive=True)
        self.process.terminate()
        for process in psutil.wait_procs([self.process], timeout=20)[1]:
            process.kill()
        for child in psutil.wait_procs(children, timeout=10)[1]:
            child.kill()


@contextmanager
def ray_head(
    folder: Path, num_cpus: int = 2, host: str = "127.0.0.1", temp_dir: Path | None = None, **environment: str
) -> Iterator[RayHead]:
    """A head node that runs meanwhile."""
    head = RayHead(folder, num_cpus, host, temp_dir, environment)
    try:
        head.start()
        yield head
    finally:
        head.stop()
