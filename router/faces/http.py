"""Shared by the HTTP APIs: authentication, error bodies, streaming, and clients that disconnect."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Annotated, Any, TypeAlias, TypeVar

from fastapi import Depends, Request
from pydantic_core import to_json
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import HoldfastError, RequestTooLarge
from router.access.keys import Identity
from router.faces.fields import MAX_NAME
from router.turns.turn import TurnChunk

T = TypeVar("T")
OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


INNER_TENANT = "holdfast.tenant"
"""In the ASGI scope of a call that the router makes itself: the tenant. No request from outside has it."""
IDENTITY = "holdfast.identity"
"""In the ASGI scope of a request that ``Doors`` let in: whom it comes from; None where anybody may call."""


async def caller(request: Request) -> Identity:
    """Whom a request comes from. Only where not everybody may call."""
    # Like all dependencies a coroutine: FastAPI hands plain functions to a thread, which costs more than the rest of
    # a request's way to its turn.
    identity: Identity = request.scope[IDENTITY]
    return identity


Caller: TypeAlias = Annotated[Identity, Depends(caller)]


async def tenant_of_request(identity: Caller) -> str:
    """The tenant that sent a request."""
    return identity.tenant


Tenant: TypeAlias = Annotated[str, Depends(tenant_of_request)]


class LimitedBody:
    """ASGI middleware that answers 413 to a request with a longer body, without reading the rest of it.

    ``limits``: in bytes, by path; "" for all other paths.
    """

    def __init__(self, app: ASGIApp, limits: dict[str, int]) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._limits.get(scope["path"], self._limits[""])
        too_large = RequestTooLarge(f"the request is larger than {max_bytes} bytes")
        announced = dict(scope["headers"]).get(b"content-length", b"")
        if announced.isdigit():
            # The server reads no more than that, and each piece of the answer saves a way through here.
            app = error_response(too_large) if int(announced) > max_bytes else self._app
            await app(scope, receive, send)
            return
        num_read, refused = 0, False

        async def limited() -> Message:
            nonlocal num_read
            message = await receive()
            num_read += len(message.get("body", b""))
            return message if num_read <= max_bytes else {"type": "http.disconnect"}

        async def answer(message: Message) -> None:
            """Replaces the app's answer to a body that was cut off."""
            nonlocal refused
            if num_read <= max_bytes:
                await send(message)
            elif not refused:
                refused = True
                await error_response(too_large)(scope, receive, send)

        await self._app(scope, limited, answer)


class RequestIds:
    """ASGI middleware: an answer has its request's ``X-Request-Id``, or a new one, as ``X-Request-Id`` and, for
    Anthropic's clients, as ``Request-Id``: what clients log of a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = given if 0 < len(given) <= MAX_NAME else uuid.uuid4().hex.encode()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                ids = [(name, request_id) for name in (b"x-request-id", b"request-id")]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        await self._app(scope, receive, sending)


def error_response(error: HoldfastError) -> JSONResponse:
    """An error in OpenAI's format."""
    body = {
        "message": error.message,
        "type": OPENAI_TYPES.get(error.http_status, "server_error"),
        "param": error.param,
        "code": error.code,
    }
    headers = {} if error.retry_after_s is None else {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return JSONResponse({"error": body}, error.http_status, headers)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T | Response:
    """The result of ``work``. If the client disconnects first, cancels ``work``, which aborts its turn."""
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
    """The first chunk. Errors before it can still be answered with their HTTP status."""
    return await anext(stream)


async def with_first(first: TurnChunk, rest: AsyncGenerator[TurnChunk, None]) -> AsyncGenerator[TurnChunk, None]:
    """The whole stream again, of which ``first_chunk`` took the first chunk. Closing it closes ``rest``."""
    try:
        yield first
        async for chunk in rest:
            yield chunk
    finally:
        await rest.aclose()


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    """A response of server-sent events."""
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


DONE = b"data: [DONE]\n\n"
"""The end of OpenAI's and SGLang's streams."""


def sse_event(body: dict[str, Any], kind: str = "") -> bytes:
    """One server-sent event. In ASCII: some clients end lines at any of Unicode's line separators."""
    name = f"event: {kind}\n".encode() if kind else b""
    return b"%sdata: %s\n\n" % (name, to_json(body, ensure_ascii=True))


async def collect(stream: AsyncIterator[TurnChunk]) -> tuple[TurnChunk, str]:
    """All chunks merged into one, and the whole text. Consumes the stream."""
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
        total.speculation = chunk.speculation
    assert total is not None, "a turn yields at least one chunk or raises"
    return total, "".join(pieces)
