"""What both HTTP faces share: who the caller is, error bodies, and noticing that a client left."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from holdfast.errors import HoldfastError, Unauthenticated
from router.gateway import TurnChunk

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
