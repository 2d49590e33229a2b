"""Jobs that may never end, in processes that are killed then."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from holdfast.errors import HoldfastError
from workers.kernels.trial_processes import run_each

LIMIT_S = 5.0


def act(job: str) -> None:
    if job == "hangs":
        time.sleep(600)
    if job == "dies":
        os._exit(1)
    if job == "raises":
        raise ValueError(job)


def test_only_what_returns_is_returned(capfd: pytest.CaptureFixture[str]) -> None:
    told = list[tuple[int, int]]()
    jobs = ["a", "hangs", "b", "dies", "c", "raises", "d"]
    assert run_each(act, jobs, 2, LIMIT_S, lambda *settled: told.append(settled)) == {"a", "b", "c", "d"}
    assert told == [(settled, 7) for settled in range(1, 8)]
    assert "ValueError: raises" in capfd.readouterr().err
    assert not [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


def test_no_jobs_need_no_process() -> None:
    assert run_each(act, [], 2, LIMIT_S, lambda *settled: None) == set()


class _Gone:
    """What no other process can read."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.read_text, ("/nonexistent",)

    def __call__(self, job: str) -> None: ...


def test_processes_that_do_not_start_are_an_error() -> None:
    with pytest.raises(HoldfastError, match="the processes that try tiles do not start"):
        run_each(_Gone(), ["a"], 2, LIMIT_S, lambda *settled: None)
