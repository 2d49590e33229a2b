"""Starting Ray on this machine."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest
import ray

from cluster.config import Config
from cluster.ray_backend.connect import STARTS, connect
from cluster.ray_backend.processes import find_actor
from holdfast.errors import HoldfastError

SLOW = "The current node timed out during startup. This could happen because the GCS has become overloaded."


class Starts:
    """Stands for ``ray.init``: each start leaves a process behind, and the first ones fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, message: str, num_failures: int) -> None:
        self._message, self._num_failures = message, num_failures
        self.processes: list[psutil.Process] = []
        monkeypatch.setattr(ray, "init", self._init)
        monkeypatch.setattr(ray, "cluster_resources", dict)

    def _init(self, **_: Any) -> None:
        self.processes.append(psutil.Process(os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)))
        if len(self.processes) <= self._num_failures:
            raise Exception(self._message)

    def end(self) -> list[bool]:
        """Whether each process still ran."""
        ran = [process.is_running() for process in self.processes]
        for process in self.processes:
            if process.is_running():
                process.kill()
                process.wait()
        return ran


def test_a_ray_that_starts_too_slowly_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(monkeypatch, SLOW, 1)
    connect(Config())
    assert starts.end() == [False, True], "the failed start leaves nothing"


@pytest.mark.parametrize(("message", "num_starts"), [(SLOW, STARTS), ("no space left on device", 1)])
def test_a_ray_that_does_not_start_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch, message: str, num_starts: int
) -> None:
    starts = Starts(monkeypatch, message, STARTS)
    with pytest.raises(HoldfastError, match=f"Ray does not start on this machine: {message}"):
        connect(Config())
    assert starts.end() == [False] * num_starts


def test_a_late_call_joins_no_cluster() -> None:
    """As of a thread that outlasts ``ray.shutdown``: by default Ray would look for one, or start it."""
    with pytest.raises(HoldfastError):
        find_actor("supervisor-0")
    assert not ray.is_initialized()
