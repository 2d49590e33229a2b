"""``holdfast.v1.SessionService``: the gRPC API."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

import grpc

from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.v1 import session_pb2, session_pb2_grpc
from holdfast.wire import abort_with, sends_errors
from router.access.rules import USER, admit
from router.core import RouterCore
from router.faces.fields import check_name, check_sampling
from router.journal.interface import SessionRecord
from router.turns.sessions import Session
from router.turns.turn import TurnChunk, TurnRequest


class SessionServer(session_pb2_grpc.SessionServiceServicer):
    """The service over a router. Cancelling Generate aborts its turn."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    def _tenant(self, context: grpc.aio.ServicerContext) -> str:
        metadata = {key: value for key, value in context.invocation_metadata() or ()}
        identity = admit(self._core.keyring, metadata.get("authorization"), USER)
        return identity.tenant if identity is not None else ""

    def _message(self, record: SessionRecord, num_tokens: int | None = None) -> session_pb2.Session:
        return session_pb2.Session(
            session_id=record.shown_id,
            worker_id=record.worker.split("@")[0],
            epoch=record.epoch,
            num_tokens=len(record.tokens) if num_tokens is None else num_tokens,
            num_turns=record.num_turns,
            busy=bool(self._core.sessions.running_turn(record.session_id)),
        )

    @sends_errors
    async def Open(self, request: session_pb2.OpenRequest, context: grpc.aio.ServicerContext) -> session_pb2.Session:
        check_name("session_id", request.session_id)
        return self._message(await self._core.control.open_session(request.session_id, self._tenant(context)))

    async def Generate(
        self, request: session_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[session_pb2.GenerateResponse]:
        if self._core.tracing is not None:
            self._core.tracing.called(context.invocation_metadata() or ())
        try:
            stream = self._stream(request, self._tenant(context))
            try:
                async for chunk in stream:
                    yield session_pb2.GenerateResponse(
                        text=chunk.text,
                        tokens=chunk.tokens,
                        logprobs=chunk.logprobs,
                        index=chunk.index,
                        finish_reason=chunk.finish_reason,
                        prompt_tokens=chunk.prompt_len,
                        cached_tokens=chunk.cached_len,
                        completion_tokens=chunk.index + len(chunk.tokens),
                        input_logprobs=chunk.input_logprobs,
                        speculation=chunk.speculation if chunk.speculation.verify_steps else None,
                    )
            finally:
                await stream.aclose()
        except HoldfastError as error:
            await abort_with(context, error)

    def _stream(self, request: session_pb2.GenerateRequest, tenant: str) -> AsyncGenerator[TurnChunk, None]:
        if request.HasField("resume_from"):
            return self._core.gateway.resume(request.session_id, tenant, request.request_id, request.resume_from)
        check_name("session_id", request.session_id)
        check_name("request_id", request.request_id)
        check_sampling(request.sampling)
        turn = TurnRequest(
            tenant=tenant,
            prepare=partial(_prepare, self._core, request),
            sampling=request.sampling,
            session_id=request.session_id,
        )
        if request.request_id:
            turn.turn_id = request.request_id
        return self._core.gateway.run(turn)

    @sends_errors
    async def Release(
        self, request: session_pb2.ReleaseRequest, context: grpc.aio.ServicerContext
    ) -> session_pb2.ReleaseResponse:
        if request.mode not in session_pb2.ReleaseMode.values():
            raise InvalidRequest(f"mode: {request.mode} is not a ReleaseMode", "mode")
        freed = await self._core.control.release(request.session_id, self._tenant(context), request.mode)
        return session_pb2.ReleaseResponse(pages_freed=freed)

    @sends_errors
    async def FreeTail(
        self, request: session_pb2.FreeTailRequest, context: grpc.aio.ServicerContext
    ) -> session_pb2.Session:
        record = await self._core.control.free_tail(request.session_id, self._tenant(context), request.keep_len)
        return self._message(record)

    @sends_errors
    async def Fork(self, request: session_pb2.ForkRequest, context: grpc.aio.ServicerContext) -> session_pb2.Session:
        at_len = request.at_len if request.HasField("at_len") else None
        tenant = self._tenant(context)
        check_name("child_id", request.child_id)
        return self._message(await self._core.control.fork(request.session_id, tenant, request.child_id, at_len))

    @sends_errors
    async def Get(self, request: session_pb2.GetRequest, context: grpc.aio.ServicerContext) -> session_pb2.Session:
        record = await self._core.control.load(request.session_id, self._tenant(context))
        return self._message(record)

    @sends_errors
    async def List(
        self, request: session_pb2.ListRequest, context: grpc.aio.ServicerContext
    ) -> session_pb2.ListResponse:
        listed = await self._core.journal.list_sessions(self._tenant(context))
        return session_pb2.ListResponse(sessions=[self._message(record, length) for record, length, _ in listed])


async def _prepare(
    core: RouterCore, request: session_pb2.GenerateRequest, session: Session | None
) -> tuple[int, array[int]]:
    keep_len = len(session.tokens) if session else 0
    if request.HasField("rewind_to"):
        if not 0 <= request.rewind_to <= keep_len:
            raise InvalidRequest(f"rewind_to: must be from 0 to {keep_len}, the session's length", "rewind_to")
        keep_len = request.rewind_to
    if request.WhichOneof("input") == "tokens":
        return keep_len, array("i", request.tokens.ids)
    return keep_len, await core.inputs.encode(request.text, special=keep_len == 0)
