"""Runs jobs that may never end, in processes that are killed then.

A process cannot give up a compiler that it waits for, nor a GPU's kernel.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

from holdfast.errors import HoldfastError

Job = TypeVar("Job")


def run_each(
    run: Callable[[Job], object],
    jobs: Iterable[Job],
    num_processes: int,
    limit_s: float,
    settled: Callable[[int, int], None],
) -> set[Job]:
    """The jobs whose ``run`` returns within ``limit_s``; the others hang, or end the process that has them.

    ``settled`` is told how many jobs are, of how many. Raises HoldfastError if the processes do not even start.
    """
    waiting = deque(jobs)
    num_jobs, num_settled, returned = len(waiting), 0, set[Job]()
    processes = [_Process(run) for _ in range(min(num_processes, num_jobs))]
    try:
        while num_settled < num_jobs:
            late_at = min(process.late_at for process in processes)
            wait_s = None if late_at == math.inf else max(0.0, late_at - time.monotonic())
            ready = wait([process.link for process in processes], wait_s)
            for process in list(processes):
                if process.link not in ready and time.monotonic() < process.late_at:
                    continue
                lives, job = process.link in ready and process.is_ready(), process.job
                if job is None and not lives:
                    raise HoldfastError("the processes that try tiles do not start")
                if job is not None:
                    num_settled += 1
                    settled(num_settled, num_jobs)
                if job is not None and lives:
                    returned.add(job)
                if lives and waiting:
                    process.take(waiting.popleft(), limit_s)
                    continue
                process.end()  # it is lost, or has nothing left to do
                processes.remove(process)
                if waiting:
                    processes.append(_Process(run))
        return returned
    finally:
        for process in processes:
            process.end()


class _Process(Generic[Job]):
    """``job``: what it runs; ``late_at``: when it should have returned."""

    def __init__(self, run: Callable[[Job], object]) -> None:
        spawn = get_context("spawn")  # a process that has used a GPU cannot fork one that does
        self.link, other = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(other, run), daemon=True)
        self._process.start()
        other.close()
        self.job: Job | None = None
        self.late_at = math.inf

    def is_ready(self) -> bool:
        """What it sends, or that it has ended."""
        with contextlib.suppress(EOFError, ConnectionError):
            self.link.recv()
            return True
        return False

    def take(self, job: Job, limit_s: float) -> None:
        self.job, self.late_at = job, time.monotonic() + limit_s
        with contextlib.suppress(ConnectionError):  # it has just ended, which its link says next
            self.link.send(job)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.link.close()


def _serve(link: Connection, run: Callable[[Job], object]) -> None:
    with contextlib.suppress(EOFError):  # nobody has another job
        while True:
            link.send(None)
            run(link.recv())
