"""HTTP connections that cost no more than their use: clients that send or read slowly are cut off."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MIN_BYTES_PER_S = 16_384
"""A request has longer than ``client_timeout_s`` for its bytes at this speed."""
MAX_HEADER_BYTES = 64 * 1024
"""Of a request line with its headers. Beyond it: 400."""

SEND_BUFFER_BYTES = 256 * 1024
"""What the system may hold of a connection's answers that its client does not read; by default it takes megabytes."""


class Connection(H11Protocol):
    """uvicorn's, with a deadline for each request to arrive, and for what was sent to be read.

    uvicorn closes connections that are idle between two requests, and waits without end for the rest of a request
    ("slowloris") and for a client that reads nothing, whose turn then never ends.
    """

    def __init__(self, *args: Any, client_timeout_s: float, max_connections: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self._timeout_s, self._max_connections = client_timeout_s, max_connections
        self._arriving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._began, self._num_received = 0.0, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._answer(503, b"too many connections")
        else:
            self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._num_received += len(data)
        self._watch_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            # Aborted, not closed: closing waits for what was not read. The turn ends as when a client leaves.
            self._unread = self.loop.call_later(self._timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._unread)
        self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._arriving)
        _cancel(self._unread)
        super().connection_lost(exc)

    def _watch_request(self) -> None:
        """Have a timer exactly while a request has begun to arrive and has not ended."""
        begun = self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]
        if not begun and self.conn.their_state is not h11.SEND_BODY:
            _cancel(self._arriving)
            self._arriving = None
        elif self._arriving is None:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        self._began, self._num_received = self.loop.time(), 0
        self._arriving = self.loop.call_later(self._timeout_s, self._look)

    def _look(self) -> None:
        """The time of a request that has not arrived is over, unless it came fast or is not being read."""
        self._arriving = None
        if self.transport.is_closing():
            return
        deadline = self._began + self._timeout_s + self._num_received / MIN_BYTES_PER_S
        if self.flow.read_paused:
            self._wait_for_request()
        elif self.loop.time() < deadline:
            self._arriving = self.loop.call_at(deadline, self._look)
        elif self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._answer(408, b"the request did not arrive in time")
        else:
            self.transport.abort()

    def _answer(self, status: int, text: bytes) -> None:
        """In place of the application, and the last of this connection."""
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=text), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def http_settings(app: Any, client_timeout_s: float, max_connections: int, drain_timeout_s: float) -> uvicorn.Config:
    """uvicorn's settings for a server whose clients are strangers."""
    connection: Any = partial(Connection, client_timeout_s=client_timeout_s, max_connections=max_connections)
    return uvicorn.Config(
        app,
        http=connection,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=round(drain_timeout_s),
        lifespan="off",
    )
