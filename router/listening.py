"""The ports that a router listens on, and how another process takes them over without a refused connection.

A port belongs to one process. Only when another is to take it over do both listen for a moment: the listening
sockets of the first get ``SO_REUSEPORT``, with which the other binds (socket(7); the first may get it after it was
bound). As soon as neither has it, new connections go to the socket that was bound last.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from holdfast.errors import ConfigError
from router.connections import SEND_BUFFER_BYTES


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind the HTTP port before anything starts: uvicorn would end the process on a failure.

    ``shared``: another process that shares it (``share_port``) listens there. Raises ConfigError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # IPPROTO_TCP is explicit, because asyncio disables Nagle's algorithm only on sockets that say so.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # its connections have it from here
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"port: {port} of {host} cannot be bound: {error.strerror}") from None
    return listener


def share_port(port: int, shared: bool) -> None:
    """Let another process of this user bind a port that this one listens on, or no longer.

    Sockets are looked up by their number: gRPC keeps its own to itself.
    """
    for listener in _listeners():
        if listener.getsockname()[1] == port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)


def _listeners() -> Iterator[socket.socket]:
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield found
