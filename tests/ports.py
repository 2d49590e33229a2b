"""Free ports, for servers that cannot choose their own."""

from __future__ import annotations

import random
import socket

PORTS = range(20_000, 32_000)
"""Below the ephemeral ports, so that no connection takes a port between the check and its use."""


def free_port() -> int:
    """A port on which nothing listens now."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
