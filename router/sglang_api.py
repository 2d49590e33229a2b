"""SGLang's native HTTP API, so that its clients can move over unchanged.

Sessions are of SGLang's two kinds. On streaming ones (``open_session`` with ``streaming``) a turn appends
to what the session has; what SGLang refuses on them is refused here in the same way, and leaves the
session as it was. On the others a request goes on from any earlier one: see ``sglang_sessions``.
"""

from __future__ import annotations

import json
import time
import uuid
from array import array
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from holdfast.errors import HoldfastError, InvalidRequest, PromptTooLong, SessionBusy, SessionNotFound
from holdfast.v1 import session_pb2
from router.fields import (
    MAX_TOP_LOGPROBS,
    Count,
    Int32,
    Int64,
    Name,
    Penalty,
    RepetitionPenalty,
    Stops,
    StopTokens,
    Temperature,
    TokenId,
)
from router.gateway import Gateway
from router.http_common import collect, first_chunk, tenant_of, until_disconnect
from router.inputs import encode
from router.sessions import Session
from router.sglang_sessions import BranchingSessions, SessionParams
from router.turns import TurnChunk, TurnRequest

DEFAULT_MAX_NEW_TOKENS = 128


class SamplingBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    max_new_tokens: Count | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: Int32 = Field(0, ge=0)
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: Int32 = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    stop: Stops | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool = False
    sampling_seed: Int64 | None = None


class GenerateBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    text: str | None = None
    input_ids: list[TokenId] | None = None
    sampling_params: SamplingBody = SamplingBody()
    session_params: SessionParams | None = None
    rid: Name | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Int32 = -1
    top_logprobs_num: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)


class OpenSessionBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    capacity_of_str_len: int = 0
    session_id: Name | None = None
    streaming: bool | None = None


class CloseSessionBody(BaseModel):
    session_id: str


class AbortBody(BaseModel):
    rid: str = ""
    abort_all: bool = False


def sglang_routes(gateway: Gateway) -> APIRouter:
    """The endpoints over a gateway."""
    routes = APIRouter()
    trees = BranchingSessions(gateway)

    def tenant(http: Request) -> str:
        return tenant_of(gateway.config.api_keys, http.headers.get("authorization"))

    @routes.api_route("/open_session", methods=["GET", "POST"])
    async def open_session(http: Request, body: OpenSessionBody) -> Any:
        session_id = body.session_id or uuid.uuid4().hex
        if not body.streaming:
            await trees.open(session_id, tenant(http))
            return session_id
        return (await gateway.control.open_session(session_id, tenant(http))).session_id

    @routes.api_route("/close_session", methods=["GET", "POST"])
    async def close_session(http: Request, body: CloseSessionBody) -> Response:
        if await trees.has(body.session_id, tenant(http)):
            await trees.close(body.session_id, tenant(http))
        else:
            await gateway.control.release(body.session_id, tenant(http))
        return Response(status_code=200)

    @routes.api_route("/generate", methods=["POST", "PUT"])
    async def generate(http: Request, body: GenerateBody) -> Any:
        request = _turn_request(gateway, body, tenant(http))
        answer = _Answer(gateway, body, request.turn_id)
        params = body.session_params
        if params is not None and params.id and await trees.has(params.id, request.tenant):
            request.create_session = True
            stream = trees.run(request, params, partial(_input_ids, gateway, body))
        else:
            _check_streaming(params)
            stream = gateway.run(request)
        try:
            if body.stream:
                first = await until_disconnect(http, first_chunk(stream))
                if isinstance(first, Response):
                    return first
                return StreamingResponse(_events(answer, first, stream), media_type="text/event-stream")
            result = await until_disconnect(http, collect(stream))
        except (PromptTooLong, SessionBusy, SessionNotFound, InvalidRequest) as error:
            return JSONResponse({"error": {"message": error.message, "code": error.code}}, 400)
        if isinstance(result, Response):
            return result
        total, text = result
        answer.add(total, text)
        return answer.body()

    @routes.post("/abort_request")
    async def abort_request(http: Request, body: AbortBody) -> Response:
        for turn_id in gateway.live_turns(tenant(http)):
            # SGLang matches by prefix, so that the parts of a batch go together.
            if body.abort_all or (body.rid and turn_id.startswith(body.rid)):
                gateway.abort(turn_id)
        return Response(status_code=200)

    @routes.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache() -> Response:
        for link in gateway.alive_links():
            await link.flush(gateway.config.control_timeout_s)
        return Response("Cache flushed.\n")

    @routes.get("/get_model_info")
    async def get_model_info() -> dict[str, Any]:
        return {
            "model_path": str(gateway.config.model),
            "tokenizer_path": str(gateway.config.model),
            "is_generation": True,
            "served_model_name": gateway.config.served_model_name,
            "max_context_length": gateway.context_len,
        }

    return routes


def _check_streaming(params: SessionParams | None) -> None:
    for name in ("offset", "replace", "drop_previous_output"):
        if params is not None and params.id and getattr(params, name):
            raise InvalidRequest(f"session_params.{name} is not supported on a streaming session, which appends")


async def _input_ids(gateway: Gateway, body: GenerateBody, num_before: int) -> array[int]:
    if body.input_ids is None:
        return await encode(gateway, body.text or "", special=num_before == 0)
    ids = array("i", body.input_ids)
    # Clients tokenize each input by itself: what comes later does not begin the sequence again.
    return ids[1:] if num_before and ids and ids[0] == gateway.codec.bos_id else ids


def _turn_request(gateway: Gateway, body: GenerateBody, tenant: str) -> TurnRequest:
    params = body.session_params
    session_id = (params.id if params else None) or ""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give one of text and input_ids")

    async def prepare(session: Session | None) -> tuple[int, array[int]]:
        keep_len = len(session.tokens) if session else 0
        return keep_len, await _input_ids(gateway, body, keep_len)

    request = TurnRequest(
        tenant=tenant,
        prepare=prepare,
        sampling=_sampling(body),
        session_id=session_id,
        create_session=False,
        queue=False,
    )
    if body.rid:
        request.turn_id = body.rid
    return request


def _sampling(body: GenerateBody) -> session_pb2.Sampling:
    s = body.sampling_params
    stops = [s.stop] if isinstance(s.stop, str) else s.stop or []
    return session_pb2.Sampling(
        temperature=s.temperature,
        top_k=max(0, s.top_k),
        top_p=s.top_p,
        min_p=s.min_p,
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        seed=s.sampling_seed,
        max_tokens=s.max_new_tokens,
        min_tokens=s.min_new_tokens,
        stop=[stop for stop in stops if stop],
        stop_token_ids=s.stop_token_ids or [],
        ignore_eos=s.ignore_eos,
        logprobs=body.top_logprobs_num if body.return_logprob else None,
        logprob_start=body.logprob_start_len if body.return_logprob and body.logprob_start_len >= 0 else None,
    )


class _Answer:
    """SGLang's response body: cumulative, also when streamed."""

    def __init__(self, gateway: Gateway, body: GenerateBody, rid: str) -> None:
        self._gateway, self._body, self._rid = gateway, body, rid
        self._started = time.monotonic()
        self._text = ""
        self._tokens: list[int] = []
        self._last: TurnChunk | None = None
        self._output: list[session_pb2.TokenLogprob] = []
        self._input: list[session_pb2.TokenLogprob] = []

    def add(self, chunk: TurnChunk, text: str) -> None:
        self._text += text
        self._tokens += chunk.tokens
        self._output += chunk.logprobs
        self._input += chunk.input_logprobs
        self._last = chunk

    def body(self) -> dict[str, Any]:
        chunk = self._last
        assert chunk is not None
        finish: dict[str, Any] | None = None
        if chunk.finish_reason:
            finish = {"type": chunk.finish_reason}
            if chunk.finish_reason == "stop":
                finish["matched"] = chunk.matched
            elif chunk.finish_reason == "length":
                finish["length"] = len(self._tokens)
            else:
                finish["message"] = "Aborted"
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": finish,
            "prompt_tokens": chunk.prompt_len,
            "completion_tokens": len(self._tokens),
            "cached_tokens": chunk.cached_len,
            "e2e_latency": time.monotonic() - self._started,
        }
        if self._body.return_logprob:
            meta["output_token_logprobs"] = [[item.logprob, item.token, None] for item in self._output]
            meta["output_top_logprobs"] = [self._top(item) for item in self._output]
            if self._body.logprob_start_len >= 0:
                # The first wanted token has nothing before it that was scored.
                meta["input_token_logprobs"] = [
                    [None, None, None],
                    *([item.logprob, item.token, None] for item in self._input),
                ]
                meta["input_top_logprobs"] = [None, *(self._top(item) for item in self._input)]
        return {"text": self._text, "output_ids": self._tokens, "meta_info": meta}

    @staticmethod
    def _top(item: session_pb2.TokenLogprob) -> list[list[Any]]:
        return [[top.logprob, top.token, None] for top in item.top]


async def _events(answer: _Answer, first: TurnChunk, stream: AsyncIterator[TurnChunk]) -> AsyncIterator[bytes]:
    chunk = first
    try:
        while True:
            answer.add(chunk, chunk.text)
            yield b"data: " + json.dumps(answer.body()).encode() + b"\n\n"
            if chunk.finish_reason:
                break
            chunk = await anext(stream)
    except HoldfastError as error:
        yield b"data: " + json.dumps({"error": {"message": error.message, "code": error.code}}).encode() + b"\n\n"
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    yield b"data: [DONE]\n\n"
