"""The parent process of ``holdfast serve``: shields the cluster from group signals, and leaves nothing behind.

A terminal's Ctrl-C and many service managers signal a whole process group. Ray's processes would end then
before the cluster has drained, and Ray's client would wait for them for a minute. So the cluster runs in a
child process with a session of its own, and this process forwards SIGINT and SIGTERM to it. A child that is
killed, or that Ray's client ends because a process of Ray is gone, is started again.

A child may ask for another beside it, the cluster's next generation, to which it hands over what it has.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import psutil

FORWARDED = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2). A subreaper becomes the parent of its orphaned descendants, so that it can find and end them."""
STOP_GRACE_S = 4.0
RESTART_PAUSE_S = 1.0
"""Before a killed child is started again: one that is killed at once does not spin."""
REAP_S = 1.0
APART, NEXT, ENDED = b"a", b"n", b"e"
"""What a child tells: it has left the group; it asks for the next generation; it ends by itself, in order."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What a child is given. ``predecessor``: a connection to the child that has asked for this one; None: it starts
    from nothing.
    """

    predecessor: socket.socket | None
    _tell: socket.socket

    def ask_for_next(self) -> socket.socket:
        """Have another child started beside this one. Returns a connection to it; its end: it has failed."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._tell, [NEXT], [theirs.fileno()])
        return ours


@dataclass(frozen=True, slots=True)
class _Child:
    """``told``: what it tells; its end: it has ended."""

    pid: int
    told: socket.socket


Run = Callable[[Generation], None]


def run_guarded(run: Run, stop_timeout_s: float) -> int:
    """Run ``run`` in a child process until it ends by itself; returns its exit code.

    A child that ends otherwise is started again, when no descendant of it is left. While there are two, one that
    ends leaves the cluster to the other.

    A first SIGINT or SIGTERM is forwarded to the children. A second one, or ``stop_timeout_s`` plus a grace
    period after the first, kills them. In any case, no descendant is left when this returns. If this process
    is killed, so are they. After a signal, a child that ended otherwise than by itself counts as stopped: 0.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = _Guard(run, stop_timeout_s)
    for number in FORWARDED:
        signal.signal(number, guard.forward)
    while True:
        if not guard.start():
            return 0  # a signal came while there was no child
        code, ended = guard.wait()
        _end_descendants()
        if ended:
            return code if code >= 0 else 128 - code
        if guard.num_signals:
            return 0  # by the deadline's kill, or because its raylet was gone first: it was to stop, and it has
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"was ended from outside with {code}"
        print(
            f"holdfast: the process that runs the Ray node {how}; starting the cluster again",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(RESTART_PAUSE_S)


class _Guard:
    """The children that run now, oldest first, and how often this process was asked to stop."""

    def __init__(self, run: Run, stop_timeout_s: float) -> None:
        self._run, self._stop_timeout_s = run, stop_timeout_s
        self._children: list[_Child] = []
        self.num_signals = 0

    def start(self, predecessor: socket.socket | None = None) -> bool:
        """Start a child, which has its own session when this returns; False: there was a signal.

        No signal is lost or seen twice: one that comes meanwhile waits here until it can be forwarded, and the
        child forgets what reached it as a member of the group.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            if self.num_signals:
                return False
            self._children.append(self._fork(predecessor))
            return True
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)

    def _fork(self, predecessor: socket.socket | None) -> _Child:
        sys.stdout.flush()
        sys.stderr.flush()
        guard = os.getpid()
        told, tell = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            told.close()
            for older in self._children:
                older.told.close()
            _leave_group(guard)
            tell.send(APART)
            _run_child(self._run, Generation(predecessor, tell))
        tell.close()
        told.recv(1)  # or its end: the child is gone already
        return _Child(pid, told)

    def wait(self) -> tuple[int, bool]:
        """Wait until no child is left, reaping orphans too.

        Returns the exit code (or minus a signal) of the last, and whether it ended in order. After a signal to stop,
        one that was killed counts only if all were: it may just have been starting.
        """
        ended, last = set[int](), None
        while True:
            readable, _, _ = select.select([child.told for child in self._children], [], [], REAP_S)
            for child in [child for child in self._children if child.told in readable]:
                word, links, _, _ = socket.recv_fds(child.told, 1, 1)
                if word == NEXT:
                    with socket.socket(fileno=links[0]) as link:
                        self.start(link)
                elif word == ENDED:
                    ended.add(child.pid)
                else:
                    code = self._take_away(child)
                    if self.num_signals and code in FORWARDED:
                        code = 0  # it was still starting, and stopped
                    if last is None or code >= 0 or not self.num_signals:
                        last = code, child.pid in ended
                    if not self._children or (child.pid in ended and not code and not self.num_signals):
                        return last
            if not readable:
                self._reap()

    def _take_away(self, child: _Child) -> int:
        """A child has ended: kill what it left, unless others are being started beside it. Returns its exit code."""
        _, status = os.waitpid(child.pid, 0)
        self._children.remove(child)
        child.told.close()
        if self._children:
            _end_descendants(but=[other.pid for other in self._children])
        return os.waitstatus_to_exitcode(status)

    def _reap(self) -> None:
        """Reap orphans that have ended."""
        pids = {child.pid for child in self._children}
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.pid not in pids and process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, 0)

    def forward(self, number: int, frame: object) -> None:
        self.num_signals += 1
        for child in self._children:
            _kill(child.pid, number if self.num_signals == 1 else signal.SIGKILL)
        if self._children and self.num_signals == 1:
            timer = threading.Timer(self._stop_timeout_s + STOP_GRACE_S, self._kill_all)
            timer.daemon = True
            timer.start()

    def _kill_all(self) -> None:
        for child in self._children:
            _kill(child.pid, signal.SIGKILL)


def _leave_group(guard: int) -> None:
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # its orphans stay its own, while another child may run beside it
    if os.getppid() != guard:
        os._exit(1)
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)  # which drops a pending one
        signal.signal(number, _exit_with)  # until what runs has its own, as Ray's is


def _exit_with(number: int, frame: object) -> None:
    sys.exit(number)


def _run_child(run: Run, generation: Generation) -> None:
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        run(generation)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        generation._tell.send(ENDED)
        os._exit(code)


def _end_descendants(but: list[int] | None = None) -> None:
    """Kill what a child left behind, and reap it. ``but``: children that go on, with what is theirs."""
    while left := [child for child in psutil.Process().children() if child.pid not in (but or ())]:
        for process in [below for child in left for below in _tree(child)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, 0)


def _tree(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
