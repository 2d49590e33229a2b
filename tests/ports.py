"""A port for what must be told its own."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)
"""Below those that systems give to connections: none of these takes one between the asking and the use."""


def free_port() -> int:
    """One that nobody listens on now."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
