"""What both HTTP faces share: who the caller is, error bodies, and noticing that a client left."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import HoldfastError, RequestTooLarge, Unauthenticated
from router.turns import TurnChunk

T = TypeVar("T")
SSE = "text/event-stream"
OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def tenant_of(api_keys: tuple[str, ...], authorization: str | None) -> str:
    """The tenant that a bearer token stands for; "" where no keys are set. Raises Unauthenticated."""
    if not api_keys:
        return ""
    given = (authorization or "").removeprefix("Bearer ").strip()
    if not any(hmac.compare_digest(given.encode(), key.encode()) for key in api_keys):
        raise Unauthenticated("a valid API key is needed: Authorization: Bearer KEY")
    return hashlib.blake2b(given.encode(), digest_size=8).hexdigest()


class LimitedBody:
    """ASGI middleware: a request with a longer body is answered with 413, before more of it is read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = RequestTooLarge(f"a request may have {self._max_bytes} bytes")
        told = dict(scope["headers"]).get(b"content-length", b"0")
        if told.isdigit() and int(told) > self._max_bytes:
            await error_response(too_large)(scope, receive, send)
            return
        num_read, refused = 0, False

        async def limited() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            return message if num_read <= self._max_bytes else {"type": "http.disconnect"}

        async def answer(message: Message) -> None:
            """Whatever the app makes of a body that is cut off, the client is told why it was."""
            nonlocal refused
            if num_read <= self._max_bytes:
                await send(message)
            elif not refused:
                refused = True
                await error_response(too_large)(scope, receive, send)

        await self._app(scope, limited, answer)


def error_response(error: HoldfastError, param: str | None = None) -> JSONResponse:
    """An error in OpenAI's shape."""
    body = {
        "message": error.message,
        "type": OPENAI_TYPES.get(error.http_status, "server_error"),
        "param": param,
        "code": error.code,
    }
    headers = {} if error.retry_after_s is None else {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return JSONResponse({"error": body}, error.http_status, headers)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T | Response:
    """``work``'s result; if the client leaves first, ``work`` is cancelled, and its turn with it."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        return Response(status_code=499)
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def first_chunk(stream: AsyncIterator[TurnChunk]) -> TurnChunk:
    """The first chunk, so that errors which come before it can still be answered with their status."""
    return await anext(stream)


async def collect(stream: AsyncIterator[TurnChunk]) -> tuple[TurnChunk, str]:
    """All chunks as one, and the whole text. Closes the stream."""
    total: TurnChunk | None = None
    pieces: list[str] = []
    async for chunk in stream:
        pieces.append(chunk.text)
        if total is None:
            total = chunk
            continue
        total.tokens += chunk.tokens
        total.logprobs += chunk.logprobs
        total.input_logprobs += chunk.input_logprobs
        total.cached_len = chunk.cached_len
        total.finish_reason, total.matched = chunk.finish_reason, chunk.matched
    assert total is not None, "a turn gives at least one chunk or raises"
    return total, "".join(pieces)
