"""Shared by chat and plain completions: parameters, the turn's request, and the answer or its stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any, Protocol

from fastapi import Request
from pydantic import BaseModel, model_validator
from starlette.responses import Response

from holdfast.errors import HoldfastError, InvalidRequest, ModelNotFound
from holdfast.v1 import session_pb2
from router.core import RouterCore
from router.faces.fields import BACKGROUND_TIER, Count, CountOrNone, Int64, Name, ServiceTier
from router.faces.grammars import GrammarFields
from router.faces.http import (
    DONE,
    collect,
    error_response,
    event_stream,
    first_chunk,
    sse_event,
    until_disconnect,
)
from router.faces.sampling import SamplingFields
from router.turns.turn import Prepare, TurnChunk, TurnRequest


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationBody(SamplingFields, GrammarFields):
    """Parameters of both endpoints."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Count = 1
    max_tokens: Count | None = None
    seed: Int64 | None = None
    min_tokens: CountOrNone = 0
    prompt_cache_key: Name = ""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    return_token_ids: bool = False
    service_tier: ServiceTier | None = None

    @model_validator(mode="after")
    def _refuse_stream_options_without_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: are only allowed with stream", "stream_options")
        return self

    def sampling(self, num_logprobs: int | None) -> session_pb2.Sampling:
        return self.sampling_message(
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            logprobs=num_logprobs,
            show_special_tokens=not self.skip_special_tokens,
            include_stop=self.include_stop_str_in_output or self.no_stop_trim,
            grammar=self.grammar(),
            background=self.service_tier == BACKGROUND_TIER,
        )


class Choice(Protocol):
    """One choice of an answer, while it grows."""

    @property
    def reasoning_tokens(self) -> int:
        """Of the output so far."""

    def whole(self, total: TurnChunk, text: str) -> dict[str, Any]:
        """The choice of a whole answer."""

    def top(self, total: TurnChunk) -> dict[str, Any]:
        """What a whole answer has beside its choices."""

    def opening(self) -> dict[str, Any]:
        """What its first event of a stream has beside it."""

    def delta(self, chunk: TurnChunk, *, first: bool) -> dict[str, Any]:
        """The choice of one event of a stream."""


class AnswerFormat(Protocol):
    """How the answers of chat and plain completions differ."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def new_choice(self, request: TurnRequest) -> Choice:
        """One choice of an answer."""


def check_model(core: RouterCore, name: str) -> None:
    """Raises ModelNotFound if a request names another model."""
    served = core.config.served_model_name
    if name and name != served:
        raise ModelNotFound(f"model {name!r} is not served here; this is {served!r}")


def check_generation(core: RouterCore, body: GenerationBody) -> None:
    """Raises ModelNotFound, and InvalidRequest for an output that no context has room for."""
    check_model(core, body.model)
    context_len = core.fleet.context_len
    if context_len and (body.max_tokens or 0) > context_len:
        raise InvalidRequest(
            f"max_tokens or max_completion_tokens is too large: {body.max_tokens}; the model's context has "
            f"{context_len} tokens",
            "max_tokens",
        )


async def generate(
    core: RouterCore,
    http: Request,
    tenant: str,
    body: GenerationBody,
    answer: AnswerFormat,
    prepare: Prepare,
    sampling: session_pb2.Sampling,
    session_id: str,
) -> Any:
    """Run a turn, or resume it from ``Last-Event-ID``, and answer as the request wants."""
    check_generation(core, body)
    request = TurnRequest(
        tenant=tenant, prepare=prepare, sampling=sampling, session_id=session_id, cache_key=body.prompt_cache_key
    )
    resumed_turn, start = _last_event(http)
    if resumed_turn:
        request.turn_id = resumed_turn
        stream = core.gateway.resume(session_id, tenant, resumed_turn, start)
    else:
        stream = core.gateway.run(request)
    head = {
        "id": f"{answer.id_prefix}-{request.turn_id}",
        "created": int(time.time()),
        "model": core.config.served_model_name,
    }
    if body.stream:
        first = await until_disconnect(http, first_chunk(stream))
        if isinstance(first, Response):
            return first
        return event_stream(_events(answer, head, request, first, stream, body.stream_options or StreamOptions()))
    result = await until_disconnect(http, collect(stream))
    if isinstance(result, Response):
        return result
    total, text = result
    choice = answer.new_choice(request)
    body_out = {"object": answer.object_name, "choices": [choice.whole(total, text)]}
    return head | body_out | choice.top(total) | {"usage": usage_of(total, len(total.tokens), choice.reasoning_tokens)}


def _last_event(http: Request) -> tuple[str, int]:
    """The turn and the output token from which a client resumes its stream (``Last-Event-ID``)."""
    turn_id, _, start = http.headers.get("last-event-id", "").rpartition(":")
    if http.headers.get("last-event-id") and not (turn_id and start.isdecimal()):
        raise InvalidRequest("Last-Event-ID: must be the id of an event of this stream")
    return turn_id, int(start or 0)


def usage_of(chunk: TurnChunk, completion_tokens: int, reasoning_tokens: int = 0) -> dict[str, Any]:
    """OpenAI's usage, including how much of the prompt was in the KV cache."""
    return {
        "prompt_tokens": chunk.prompt_len,
        "completion_tokens": completion_tokens,
        "total_tokens": chunk.prompt_len + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": chunk.cached_len},
        "completion_tokens_details": completion_details([chunk], reasoning_tokens),
    }


def completion_details(chunks: Iterable[TurnChunk], reasoning_tokens: int) -> dict[str, int]:
    """OpenAI's details of outputs, given their last chunks."""
    drafts = [chunk.speculation for chunk in chunks]
    accepted = sum(each.prediction_accepted for each in drafts)
    return {
        "reasoning_tokens": reasoning_tokens,
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(each.prediction_proposed for each in drafts) - accepted,
    }


async def _events(
    answer: AnswerFormat,
    head: dict[str, Any],
    request: TurnRequest,
    first: TurnChunk,
    stream: AsyncGenerator[TurnChunk, None],
    options: StreamOptions,
) -> AsyncIterator[bytes]:
    head = head | {"object": answer.chunk_object_name}
    num_tokens, chunk, choice = 0, first, answer.new_choice(request)
    try:
        while True:
            num_tokens = max(num_tokens, chunk.index + len(chunk.tokens))
            body = head | {"choices": [choice.delta(chunk, first=chunk is first)]}
            if chunk is first:
                body |= choice.opening()
            if options.include_usage:
                body["usage"] = usage_of(chunk, num_tokens) if options.continuous_usage_stats else None
            event = f"id: {request.turn_id}:{num_tokens}\n".encode() + sse_event(body)
            if chunk.finish_reason:
                break
            yield event
            chunk = await anext(stream)
        if options.include_usage:
            usage = usage_of(chunk, num_tokens, choice.reasoning_tokens)
            event += sse_event(head | {"choices": [], "usage": usage})
        yield event + DONE
    except HoldfastError as error:
        yield b"data: " + bytes(error_response(error).body) + b"\n\n"
    finally:
        await stream.aclose()
