"""HTTP connections that cost no more than their use: clients that send or read slowly are cut off."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MIN_BYTES_PER_S = 16_384
"""A request has longer than ``client_timeout_s`` for its bytes at this speed."""
MAX_HEADER_BYTES = 64 * 1024
"""Of a request line with its headers. Beyond it: 400."""

SEND_BUFFER_BYTES = 256 * 1024
"""What the system may hold of a connection's answers that its client does not read; by default it takes megabytes."""


class Connection(HttpToolsProtocol):
    """uvicorn's, with a limit for headers, and a deadline for each request to arrive, and for answers to be read.

    uvicorn closes connections that are idle between two requests, and waits without end for the rest of a request
    ("slowloris") and for a client that reads nothing, whose turn then never ends.
    """

    def __init__(self, *args: Any, client_timeout_s: float, max_connections: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self._timeout_s, self._max_connections = client_timeout_s, max_connections
        self._arriving: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._began, self._num_received = 0.0, 0
        self._is_partial, self._in_headers = False, True
        """The last request has begun to arrive and has not ended; and where its headers have not."""
        self._num_held = 0
        """Bytes that the parser may hold: those since a request's last piece."""
        self._skips_headers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._answer(503, b"too many connections")
        else:
            self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        self._num_received += len(data)
        self._num_held += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
            if self._num_held > MAX_HEADER_BYTES:
                raise httptools.HttpParserError("the headers are too long")
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        self._watch_request()

    def _parse(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # Java's HttpClient asks for HTTP/2 by default. A server may ignore that (RFC 9110, 7.8); the parser
                # ends the request there, without its body.
                self._await_body()
                rest = rest[upgrade.args[0] :]

    def _await_body(self) -> None:
        """Have the rest of what arrives parsed as it would be if the last request had not asked for an upgrade."""
        framing = [header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        self.cycle.more_body = self._is_partial = True
        self._skips_headers = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(b"%s: %s\r\n" % each for each in framing))

    def on_message_begin(self) -> None:
        if not self._skips_headers:
            super().on_message_begin()
            self._is_partial = self._in_headers = True

    def on_url(self, url: bytes) -> None:
        if not self._skips_headers:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._skips_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._skips_headers:
            self._skips_headers = False
            return
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADER_BYTES:
            raise ValueError("the request's headers are too long")  # the parser makes it a 400
        self._in_headers, self._num_held = False, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_held = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_partial, self._num_held = False, 0
        super().on_message_complete()

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
        """Have a timer exactly while a request has begun to arrive and has not ended.

        Not for one that came before the last was answered: it waits for this server.
        """
        is_next = not self.pipeline and (not self._in_headers or self.cycle is None or self.cycle.response_complete)
        if not (self._is_partial and is_next):
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
        elif self._in_headers or not self.cycle.response_started:
            self._answer(408, b"the request did not arrive in time")
        else:
            self.transport.abort()

    def _answer(self, status: int, text: bytes) -> None:
        """In place of the application, and the last of this connection."""
        headers = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + headers % len(text) + text)
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
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=round(drain_timeout_s),
        lifespan="off",
    )
