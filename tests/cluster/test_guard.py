"""The guard of ``holdfast serve``: forwards signals, enforces deadlines, and leaves no descendant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent

# Serves until SIGTERM, which it may ignore, with a child in a session of its own, as Ray's processes are.
PROGRAM = """
import os, signal, subprocess, sys, time
from cluster.guard import run_guarded

def run(generation):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    stopped = []
    def stop(number, frame):
        stopped.append(number)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    print(os.getpid(), child.pid, flush=True)
    while not stopped or {ignores}:
        time.sleep(0.01)
    {end}

os.register_at_fork(after_in_parent=lambda: time.sleep({fork_s}))
sys.exit(run_guarded(run, {stop_timeout_s}))
"""


class Guarded:
    def __init__(
        self, ignores: bool = False, end: str = "pass", stop_timeout_s: float = 60.0, fork_s: float = 0.0
    ) -> None:
        program = PROGRAM.format(ignores=ignores, end=end, stop_timeout_s=stop_timeout_s, fork_s=fork_s)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.pids = self.next_pids()

    def next_pids(self) -> list[int]:
        """Of the child that starts next, and of its own."""
        assert self.process.stdout is not None
        return [int(word) for word in self.process.stdout.readline().split()]

    def signal_group(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)

    def assert_ended(self, code: int) -> None:
        assert self.process.wait(30) == code
        assert self.process.stdout is not None
        self.process.stdout.close()
        deadline = time.monotonic() + 10
        while any(map(running, self.pids)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(running, self.pids))


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("fork_s", [0.0, 0.5], ids=["", "while the guard still forks"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_group_signal_reaches_the_child_once_and_nothing_is_left(number: signal.Signals, fork_s: float) -> None:
    guarded = Guarded(end=f"assert stopped == [{number:d}], stopped", fork_s=fork_s)
    guarded.signal_group(number)
    guarded.assert_ended(0)


def test_a_second_signal_kills() -> None:
    guarded = Guarded(ignores=True)
    guarded.signal_group(signal.SIGINT)
    time.sleep(0.3)
    assert running(guarded.pids[0]), "the first signal is a request"
    guarded.signal_group(signal.SIGINT)
    guarded.assert_ended(0)


def test_the_deadline_kills() -> None:
    guarded = Guarded(ignores=True, stop_timeout_s=-3.5)  # half a second, with the grace period
    guarded.signal_group(signal.SIGTERM)
    guarded.assert_ended(0)


def test_the_child_s_exit_code_is_the_guard_s() -> None:
    guarded = Guarded(end="sys.exit(3)")
    guarded.signal_group(signal.SIGTERM)
    guarded.assert_ended(3)


def test_a_child_that_fails_tells_why(tmp_path: Path) -> None:
    program = "import sys\nfrom cluster.guard import run_guarded\nsys.exit(run_guarded(lambda generation: 1 / 0, 1.0))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_a_killed_child_takes_its_descendants_along_and_is_started_again() -> None:
    guarded = Guarded()
    os.kill(guarded.pids[0], signal.SIGKILL)
    again = guarded.next_pids()
    assert not any(map(running, guarded.pids)) and all(map(running, again))
    guarded.pids = again
    guarded.signal_group(signal.SIGTERM)
    guarded.assert_ended(0)


def test_a_signal_while_there_is_no_child_starts_none() -> None:
    guarded = Guarded()
    os.kill(guarded.pids[0], signal.SIGKILL)
    while running(guarded.pids[0]):
        time.sleep(0.01)
    guarded.signal_group(signal.SIGTERM)
    assert not guarded.next_pids()
    guarded.assert_ended(0)


def test_a_child_that_a_library_ends_is_started_again(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, sys
from cluster.guard import run_guarded

def run(generation):
    ended = pathlib.Path({str(tmp_path / "ended")!r})
    if ended.exists():
        sys.exit(5)
    ended.touch()
    os._exit(1)  # as Ray's client does, when its raylet is gone

sys.exit(run_guarded(run, 1.0))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 5 and "ended from outside" in done.stderr


def test_a_child_that_a_library_ends_while_it_stops_has_stopped() -> None:
    program = """
import os, signal, sys, time
from cluster.guard import run_guarded

def run(generation):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    os.write(1, b"up\\n")
    time.sleep(60)

sys.exit(run_guarded(run, 1.0))
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(30) == 0


def test_a_killed_guard_takes_the_child_along() -> None:
    guarded = Guarded()
    guarded.process.kill()
    guarded.process.wait(10)
    assert guarded.process.stdout is not None
    guarded.process.stdout.close()
    deadline = time.monotonic() + 10
    while running(guarded.pids[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(guarded.pids[0])
    os.kill(guarded.pids[1], signal.SIGKILL)  # Ray's processes end by themselves then


# The first child asks for another, twice if the other fails at first, and ends when that one says so.
GENERATIONS = """
import os, pathlib, subprocess, sys, time
from cluster.guard import run_guarded

failed = pathlib.Path(sys.argv[1])

def run(generation):
    if generation.predecessor is None:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print(os.getpid(), child.pid, flush=True)
        while (link := generation.ask_for_next()).recv(1) == b"":
            link.close()
        os._exit({code})
    if not failed.exists():
        failed.touch()
        {fails}
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    generation.predecessor.send(b"1")
    print(os.getpid(), child.pid, flush=True)
    sys.stdin.readline()
    print(os.getpid(), flush=True)
    sys.exit(3)

sys.exit(run_guarded(run, 1.0))
"""


@pytest.mark.parametrize("code", [0, 1], ids=["in order", "at once"])
@pytest.mark.parametrize("fails", ["sys.exit(1)", "os.kill(os.getpid(), 9)"])
def test_a_generation_ends_and_the_next_goes_on(tmp_path: Path, fails: str, code: int) -> None:
    program = GENERATIONS.format(fails=fails, code=code)
    command = [sys.executable, "-c", program, str(tmp_path / "failed")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        first = [int(word) for word in process.stdout.readline().split()]
        second = [int(word) for word in process.stdout.readline().split()]
        deadline = time.monotonic() + 10
        while any(map(running, first)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(map(running, first)) and all(map(running, second)), "it took its own along, and no other's"
        process.stdin.write("\n")
        process.stdin.close()
        assert int(process.stdout.readline()) == second[0], "it was not started again"
        assert process.wait(30) == 3 and not any(map(running, second))


@pytest.mark.parametrize("is_starting", [False, True])
def test_a_signal_reaches_both_generations(tmp_path: Path, is_starting: bool) -> None:
    program = f"""
import os, pathlib, signal, sys, time
from cluster.guard import run_guarded

def run(generation):
    name = "first" if generation.predecessor is None else "second"
    def stop(number, frame):
        pathlib.Path({str(tmp_path)!r}, name).touch()
        sys.exit(0)
    if name == "first" or not {is_starting}:
        signal.signal(signal.SIGTERM, stop)  # else it ends where it is
    if generation.predecessor is None:
        generation.ask_for_next()
    os.write(1, (name + "\\n").encode())  # in one piece, as both write to one pipe
    time.sleep(60)

sys.exit(run_guarded(run, 1.0))
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert {process.stdout.readline().strip() for _ in range(2)} == {"first", "second"}
        process.terminate()
        assert process.wait(30) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"first"} | ({"second"} if not is_starting else set())
