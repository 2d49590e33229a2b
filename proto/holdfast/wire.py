"""Errors and versions over gRPC, and the options of all servers and channels."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from holdfast import errors
from holdfast.errors import HoldfastError

CODE_KEY = "holdfast-code"
RETRY_KEY = "retry-after-s"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A prompt of a million tokens is 4 MB."""
SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
]
WIRE_VERSION = 1
"""Of the messages between a cluster's processes. A change that a process of the version before would misunderstand
makes it the next one: two processes talk if their versions are neighbours, so that an upgrade can go from one to
another.
"""
_AGENT = "holdfast-wire/"
LAST_EPOCH = 2**62
"""Of a release of what the journal does not know: later than any epoch that a worker can have seen."""
CHANNEL_OPTIONS = SERVER_OPTIONS[:2]


def _subclasses(base: type[HoldfastError]) -> dict[str, type[HoldfastError]]:
    found = {base.code: base}
    for child in base.__subclasses__():
        found |= _subclasses(child)
    return found


_BY_CODE = _subclasses(errors.HoldfastError)


def agent_option(version: int = WIRE_VERSION) -> tuple[str, str]:
    """A channel's option that tells servers its version."""
    return ("grpc.primary_user_agent", f"{_AGENT}{version}")


def version_error(user_agent: str) -> errors.IncompatibleVersion | None:
    """Why a caller is refused; None: it is not. One that says nothing of its version counts as one of this version."""
    told = re.search(rf"{_AGENT}(\d+)", user_agent)
    if told is None or abs(int(told[1]) - WIRE_VERSION) <= 1:
        return None
    return errors.IncompatibleVersion(
        f"the caller's version of the cluster's messages is {told[1]}, this process's {WIRE_VERSION}: they may be one "
        "apart; upgrade by way of a release between them"
    )


def error_from_code(code: str, message: str) -> HoldfastError:
    """The error with that code."""
    return _BY_CODE.get(code, HoldfastError)(message)


def error_from_rpc(rpc_error: grpc.aio.AioRpcError) -> HoldfastError:
    """The error behind a failed call. A transport failure becomes NoWorkerAvailable."""
    sent = sent_error(rpc_error)
    if sent is not None:
        return sent
    if rpc_error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(rpc_error.details() or "the call took too long")
    return errors.NoWorkerAvailable(f"the call failed: {rpc_error.code().name} {rpc_error.details()}")


def sent_error(rpc_error: grpc.aio.AioRpcError) -> HoldfastError | None:
    """The error that the peer sent with ``abort_with``; None if the call failed for another reason."""
    for key, value in rpc_error.trailing_metadata() or ():
        if key == CODE_KEY:
            return error_from_code(str(value), rpc_error.details() or str(value))
    return None


def was_closed() -> bool:
    """Whether a CancelledError says that the call is over, not its caller: closing a channel, or cancelling a call,
    cancels those who wait for an answer as if they had been cancelled themselves.
    """
    task = asyncio.current_task()
    return task is not None and not task.cancelling()


async def abort_with(context: grpc.aio.ServicerContext, error: HoldfastError) -> None:
    """End a call with ``error``."""
    metadata = [(CODE_KEY, error.code)]
    if error.retry_after_s is not None:
        metadata.append((RETRY_KEY, str(error.retry_after_s)))
    await context.abort(grpc.StatusCode[error.grpc_code], error.message, tuple(metadata))


def sends_errors(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Decorate a unary method so that its HoldfastErrors become gRPC statuses."""

    async def sending(self: Any, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(self, request, context)
        except HoldfastError as error:
            await abort_with(context, error)

    return sending
