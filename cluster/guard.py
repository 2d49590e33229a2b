"""The parent process of ``holdfast serve``: shields the cluster from group signals, and leaves nothing behind.

A terminal's Ctrl-C and many service managers signal a whole process group. Ray's processes would end then
before the cluster has drained, and Ray's client would wait for them for a minute. So the cluster runs in a
child process with a session of its own, and this process forwards SIGINT and SIGTERM to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import psutil

FORWARDED = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2). A subreaper becomes the parent of its orphaned descendants, so that it can find and end them."""
STOP_GRACE_S = 4.0


def run_guarded(run: Callable[[], None], stop_timeout_s: float) -> int:
    """Run ``run`` in a child process; returns its exit code.

    A first SIGINT or SIGTERM is forwarded to the child. A second one, or ``stop_timeout_s`` plus a grace
    period after the first, kills it. In any case, no descendant is left when this returns. If this process
    is killed, so is the child.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    child = _fork(run)
    num_signals = 0

    def forward(number: int, frame: object) -> None:
        nonlocal num_signals
        num_signals += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number if num_signals == 1 else signal.SIGKILL)
        if num_signals == 1:
            timer = threading.Timer(stop_timeout_s + STOP_GRACE_S, _kill, (child,))
            timer.daemon = True
            timer.start()

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = _wait_for(child)
    _end_descendants()
    code = os.waitstatus_to_exitcode(status)
    # Killed at the deadline after a signal: it was asked to stop, and it has.
    return 0 if num_signals and code == -signal.SIGKILL else code if code >= 0 else 128 - code


def _fork(run: Callable[[], None]) -> int:
    """Start ``run`` in a child process; returns its id, with ``FORWARDED`` blocked here, once it has its own session.

    No signal is lost or seen twice: one that comes meanwhile waits here until it can be forwarded, and the
    child forgets what reached it as a member of the group.
    """
    guard = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    apart, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(apart)
        _leave_group(guard)
        os.close(tell)
        _run_child(run)
    os.close(tell)
    os.read(apart, 1)  # to its end: no process holds the other side any more
    os.close(apart)
    return child


def _leave_group(guard: int) -> None:
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard:
        os._exit(1)
    for number in FORWARDED:
        handler = signal.signal(number, signal.SIG_IGN)  # which drops a pending one
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def _run_child(run: Callable[[], None]) -> None:
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
        os._exit(code)


def _wait_for(child: int) -> int:
    """Wait for the child, reaping other descendants that were orphaned."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _end_descendants() -> None:
    """Kill what the child left behind, and reap it."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
