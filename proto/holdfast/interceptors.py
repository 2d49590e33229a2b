"""What a gRPC server does before a method: asked of every handler, whatever it streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

Check = Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]
"""Looks at a request (or a stream of them) and its context, and ends the call if something is wrong."""


def checked(handler: Any, check: Check, deserializer: Any = None, read_timeout_s: float | None = None) -> Any:
    """The handler, with ``check`` before its method, and ``deserializer`` in place of its own.

    A call whose caller does not read an answer for ``read_timeout_s`` ends with DEADLINE_EXCEEDED.
    """

    def one(act: Any) -> Any:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await check(request, context)
            return await act(request, context)

        return answer

    def stream(act: Any) -> Any:
        async def answer(request: Any, context: grpc.aio.ServicerContext) -> None:
            await check(request, context)
            answers, read = act(request, context), True
            try:
                async for each in answers:
                    read = await _written(context, each, read_timeout_s)
                    if not read:
                        break
            finally:
                await answers.aclose()
            if not read:  # last, because the caller may not read this either
                late = f"an answer was not read within {read_timeout_s} s"
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, late)

        return answer

    kinds: dict[tuple[bool, bool], tuple[Any, Any, Any]] = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary, one),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream, stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary, one),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream, stream),
    }
    make, act, guard = kinds[handler.request_streaming, handler.response_streaming]
    return make(guard(act), deserializer or handler.request_deserializer, handler.response_serializer)


async def _written(context: grpc.aio.ServicerContext, answer: Any, timeout_s: float | None) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(answer)
    except TimeoutError:
        return False
    return True


class Strangers(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types here
    """For callers that may send anything, and read nothing.

    Answers INVALID_ARGUMENT to bytes that are no message: gRPC answers UNKNOWN and writes a traceback to the log, which
    anybody can fill so. ``read_timeout_s``: how long a caller may take to read an answer.
    """

    def __init__(self, read_timeout_s: float) -> None:
        self._read_timeout_s = read_timeout_s

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler
        parse = handler.request_deserializer

        def parsed(data: bytes) -> Any:
            try:
                return parse(data)
            except DecodeError:
                return None

        async def check(request: Any, context: grpc.aio.ServicerContext) -> None:
            if request is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"these bytes are no request of {details.method}")

        return checked(handler, check, parsed, self._read_timeout_s)
