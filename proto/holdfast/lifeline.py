"""Lifelines: sockets that end the moment their processes are killed.

Of a process that is killed the kernel first frees the memory and then closes the files, connections among them. With
gigabytes of KV and weights that takes tens of milliseconds, with a GPU's pinned memory more, and its peers wait. A
thread with a table of files of its own (unshare(2), CLONE_FILES) has them closed when that thread ends. The memory is
freed by the thread that ends last, so one of the two is closed before: the lifeline, or all other connections.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import threading
from collections.abc import Iterable

CLONE_FILES = 0x400
BACKLOG = 4096
"""Connections are never accepted: the kernel completes them, and resets them when the socket is closed."""


def open_lifeline(host: str) -> str:
    """Open this process's lifeline on a free port of ``host``. Returns its address.

    Empty where the system does not allow it (Docker's default seccomp profile does not): then peers notice this
    process's end when its other connections are closed. There is no way to close it but to end the process.
    """
    opened, port = threading.Event(), list[int]()
    threading.Thread(target=_hold, args=(host, port, opened), name="holdfast-lifeline", daemon=True).start()
    opened.wait()
    return f"{host}:{port[0]}" if port else ""


def _hold(host: str, port: list[int], opened: threading.Event) -> None:
    # A signal's handler would write to a file that this thread does not have, and wake nobody.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    collects = gc.isenabled()
    gc.disable()  # a file that was closed by a collection in this thread would stay open in the others
    try:
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "unshare") or libc.unshare(CLONE_FILES) != 0:
            return
        for file in map(int, os.listdir("/proc/thread-self/fd")):
            os.closerange(file, file + 1)
        listener = socket.create_server((host, 0), backlog=BACKLOG)
        port.append(listener.getsockname()[1])
    finally:
        if collects:
            gc.enable()
        opened.set()
    while True:
        libc.pause()


async def one_ended(addresses: Iterable[str]) -> None:
    """Returns when a process with one of these lifelines has ended. Those that cannot be reached now say nothing."""
    ends = [asyncio.create_task(_ended(address)) for address in addresses]
    try:
        if not ends:
            await asyncio.get_running_loop().create_future()
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()


async def _ended(address: str) -> None:
    host, _, port = address.rpartition(":")
    was_reached = False
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            if was_reached:
                return
            break
        except OSError:
            break
        was_reached = True
        try:
            await reader.read(1)
        except OSError:
            pass
        finally:
            writer.close()
        # Something between may have ended the connection: a process that has ended takes no other.
    await asyncio.get_running_loop().create_future()
