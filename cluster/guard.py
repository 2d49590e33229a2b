"""The parent process of ``holdfast serve``: shields the cluster from group signals, and leaves nothing behind.

A terminal's Ctrl-C and many service managers signal a whole process group. Ray's processes would end then
before the cluster has drained, and Ray's client would wait for them for a minute. So the cluster runs in a
child process with a session of its own, and this process forwards SIGINT and SIGTERM to it. A child that is
killed, or that Ray's client ends because a process of Ray is gone, is started again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

import psutil

FORWARDED = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2). A subreaper becomes the parent of its orphaned descendants, so that it can find and end them."""
STOP_GRACE_S = 4.0
RESTART_PAUSE_S = 1.0
"""Before a killed child is started again: one that is killed at once does not spin."""
APART, ENDED = b"a", b"e"
"""What a child tells: it has left the group; it ends by itself, in order."""


def run_guarded(run: Callable[[], None], stop_timeout_s: float) -> int:
    """Run ``run`` in a child process until it ends by itself; returns its exit code.

    A child that ends otherwise is started again, when no descendant of it is left.

    A first SIGINT or SIGTERM is forwarded to the child. A second one, or ``stop_timeout_s`` plus a grace
    period after the first, kills it. In any case, no descendant is left when this returns. If this process
    is killed, so is the child.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = _Guard(stop_timeout_s)
    for number in FORWARDED:
        signal.signal(number, guard.forward)
    while True:
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        if guard.num_signals:
            return 0  # it came while there was no child
        told = guard.start(run)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = guard.wait()
        _end_descendants()
        ended = os.read(told, 1) == ENDED
        os.close(told)
        if guard.num_signals and code == -signal.SIGKILL:
            return 0  # killed at the deadline after a signal: it was asked to stop, and it has
        if ended or guard.num_signals:
            return code if code >= 0 else 128 - code
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"was ended from outside with {code}"
        print(
            f"holdfast: the process that runs the Ray node {how}; starting the cluster again",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(RESTART_PAUSE_S)


class _Guard:
    """The child that runs now, and how often this process was asked to stop."""

    def __init__(self, stop_timeout_s: float) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._child: int | None = None
        self.num_signals = 0

    def start(self, run: Callable[[], None]) -> int:
        """Start ``run`` in a child process, which has its own session when this returns. Call with ``FORWARDED``
        blocked. Returns a pipe of what the child tells.

        No signal is lost or seen twice: one that comes meanwhile waits here until it can be forwarded, and the
        child forgets what reached it as a member of the group.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        guard = os.getpid()
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            _leave_group(guard)
            os.write(tell, APART)
            _run_child(run, tell)
        os.close(tell)
        os.read(told, 1)  # or its end: the child is gone already
        self._child = child
        return told

    def wait(self) -> int:
        """Wait for the child, reaping orphaned descendants too. Returns its exit code, or minus a signal."""
        while True:
            pid, status = os.wait()
            if pid == self._child:
                self._child = None
                return os.waitstatus_to_exitcode(status)

    def forward(self, number: int, frame: object) -> None:
        self.num_signals += 1
        if self._child is None:
            return
        _kill(self._child, number if self.num_signals == 1 else signal.SIGKILL)
        if self.num_signals == 1:
            timer = threading.Timer(self._stop_timeout_s + STOP_GRACE_S, _kill, (self._child, signal.SIGKILL))
            timer.daemon = True
            timer.start()


def _leave_group(guard: int) -> None:
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    for number in FORWARDED:
        handler = signal.signal(number, signal.SIG_IGN)  # which drops a pending one
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _run_child(run: Callable[[], None], tell: int) -> None:
    code = 1
    try:
        run()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(tell, ENDED)
        os._exit(code)


def _end_descendants() -> None:
    """Kill what the child left behind, and reap it."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
