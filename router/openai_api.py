"""OpenAI's HTTP API: models, completions, chat completions."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from holdfast.errors import HoldfastError, InvalidRequest, ModelNotFound
from holdfast.v1 import session_pb2
from router.fields import (
    MAX_TOP_LOGPROBS,
    Count,
    Int32,
    Int64,
    Name,
    OpenAIBody,
    Penalty,
    RepetitionPenalty,
    SessionHeader,
    Stops,
    StopTokens,
    Temperature,
    TokenId,
    refuse_unsupported,
)
from router.gateway import Gateway
from router.http_common import SSE, collect, error_response, first_chunk, tenant_of, until_disconnect
from router.inputs import prepare_text, prepare_tokens
from router.turns import Prepare, TurnChunk, TurnRequest


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Generation(OpenAIBody):
    """Parameters that both endpoints share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: Count | None = None
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: Int32 = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Int64 | None = None
    stop: Stops | None = None
    stop_token_ids: StopTokens = Field(default_factory=list)
    min_tokens: Int32 = Field(0, ge=0)
    ignore_eos: bool = False
    prompt_cache_key: Name = ""
    logit_bias: dict[str, float] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> _Generation:
        text_only = self.response_format in (None, {"type": "text"})
        refuse_unsupported(
            {
                "n": self.n != 1,
                "logit_bias": bool(self.logit_bias),
                "tools": bool(self.tools),
                "functions": bool(self.functions),
                "response_format": not text_only,
            }
        )
        return self

    def sampling(self, num_logprobs: int | None) -> session_pb2.Sampling:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return session_pb2.Sampling(
            temperature=self.temperature,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop=[stop for stop in stops if stop],
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=num_logprobs,
        )


class ChatRequest(_Generation):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)


class CompletionRequest(_Generation):
    prompt: str | list[TokenId] | list[str]
    max_tokens: Count | None = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    suffix: str = ""
    best_of: int = 1

    @model_validator(mode="after")
    def _refuse_other_texts(self) -> CompletionRequest:
        refuse_unsupported({"echo": self.echo, "suffix": bool(self.suffix), "best_of": self.best_of != 1})
        return self


def openai_routes(gateway: Gateway) -> APIRouter:
    """The endpoints over a gateway."""
    routes = APIRouter()
    started = int(time.time())

    def check_model(name: str) -> None:
        if name and name != gateway.config.served_model_name:
            raise ModelNotFound(f"model {name!r} is not served here; this is {gateway.config.served_model_name!r}")

    def model_card() -> dict[str, Any]:
        return {
            "id": gateway.config.served_model_name,
            "object": "model",
            "created": started,
            "owned_by": "holdfast",
            "max_model_len": gateway.context_len,
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(name)
        return model_card()

    async def answer(
        http: Request, body: _Generation, kind: _Kind, prepare: Prepare, sampling: session_pb2.Sampling, session_id: str
    ) -> Any:
        check_model(body.model)
        request = TurnRequest(
            tenant=tenant_of(gateway.config.api_keys, http.headers.get("authorization")),
            prepare=prepare,
            sampling=sampling,
            session_id=session_id,
            cache_key=body.prompt_cache_key,
        )
        head = {
            "id": f"{kind.prefix}-{request.turn_id}",
            "created": int(time.time()),
            "model": gateway.config.served_model_name,
        }
        turn_id, start = last_event(http)
        if turn_id:
            request.turn_id = turn_id
            head["id"] = f"{kind.prefix}-{turn_id}"
            stream = gateway.resume(session_id, request.tenant, turn_id, start)
        else:
            stream = gateway.run(request)
        if body.stream:
            first = await until_disconnect(http, first_chunk(stream))
            if isinstance(first, Response):
                return first
            usage = body.stream_options is not None and body.stream_options.include_usage
            events = _events(gateway, kind, head, request.turn_id, first, stream, usage)
            return StreamingResponse(events, media_type=SSE, headers={"Cache-Control": "no-cache"})
        result = await until_disconnect(http, collect(stream))
        if isinstance(result, Response):
            return result
        total, text = result
        choice = kind.choice(gateway, total, text)
        return head | {"object": kind.name, "choices": [choice], "usage": usage_of(total, len(total.tokens))}

    @routes.post("/v1/chat/completions")
    async def chat(http: Request, body: ChatRequest, x_session_id: SessionHeader = "") -> Any:
        text = gateway.codec.render_chat([_plain(message) for message in body.messages])
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        sampling = body.sampling(body.top_logprobs if body.logprobs else None)
        return await answer(http, body, CHAT, prepare_text(gateway, text, special=False), sampling, x_session_id)

    @routes.post("/v1/completions")
    async def complete(http: Request, body: CompletionRequest, x_session_id: SessionHeader = "") -> Any:
        prompt = body.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt):
            raise InvalidRequest("prompt: several prompts in one request are not supported")
        prepare = (
            prepare_text(gateway, prompt, special=True)
            if isinstance(prompt, str)
            else prepare_tokens(array("i", prompt))  # type: ignore[arg-type]
        )
        return await answer(http, body, COMPLETION, prepare, body.sampling(body.logprobs), x_session_id)

    return routes


def last_event(http: Request) -> tuple[str, int]:
    """The turn and the output token that a client wants its stream to go on with (``Last-Event-ID``)."""
    turn_id, _, start = http.headers.get("last-event-id", "").rpartition(":")
    if http.headers.get("last-event-id") and not (turn_id and start.isdecimal()):
        raise InvalidRequest("Last-Event-ID: must be the id of an event of this stream")
    return turn_id, int(start or 0)


# ---- input ---------------------------------------------------------------------------------------


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text; OpenAI's clients may send it in typed parts."""
    if not isinstance(message.get("role"), str):
        raise InvalidRequest("messages: each message needs a role")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise InvalidRequest("messages: only text content is supported")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise InvalidRequest("messages: content must be text")
    return message | {"content": content}


# ---- output --------------------------------------------------------------------------------------


class _Kind:
    """How chat and plain completions differ in their answers."""

    def __init__(self, prefix: str, name: str, chunk_name: str) -> None:
        self.prefix, self.name, self.chunk_name = prefix, name, chunk_name

    def choice(self, gateway: Gateway, total: TurnChunk, text: str) -> dict[str, Any]:
        body: dict[str, Any] = {"index": 0, "finish_reason": total.finish_reason}
        if self is CHAT:
            body |= {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            body |= {"text": text}
        return body | {"logprobs": self.logprobs(gateway, total)}

    def delta(self, gateway: Gateway, chunk: TurnChunk, *, first: bool) -> dict[str, Any]:
        finish = chunk.finish_reason or None
        if self is CHAT:
            role = {"role": "assistant"} if first else {}
            body: dict[str, Any] = {"index": 0, "delta": role | {"content": chunk.text}, "finish_reason": finish}
        else:
            body = {"index": 0, "text": chunk.text, "finish_reason": finish}
        return body | {"logprobs": self.logprobs(gateway, chunk)}

    def logprobs(self, gateway: Gateway, chunk: TurnChunk) -> dict[str, Any] | None:
        if not chunk.logprobs:
            return None
        decode = gateway.codec.decode
        if self is CHAT:
            return {"content": [_chat_logprob(gateway, item) for item in chunk.logprobs], "refusal": None}
        return {
            "tokens": [decode([item.token]) for item in chunk.logprobs],
            "token_logprobs": [item.logprob for item in chunk.logprobs],
            "top_logprobs": [{decode([t.token]): t.logprob for t in item.top} for item in chunk.logprobs],
            "text_offset": [],
        }


CHAT = _Kind("chatcmpl", "chat.completion", "chat.completion.chunk")
COMPLETION = _Kind("cmpl", "text_completion", "text_completion")


def _chat_logprob(gateway: Gateway, item: session_pb2.TokenLogprob) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = gateway.codec.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return entry(item.token, item.logprob) | {"top_logprobs": [entry(t.token, t.logprob) for t in item.top]}


def usage_of(chunk: TurnChunk, completion_tokens: int) -> dict[str, Any]:
    """OpenAI's usage, with how much of the prompt was in the KV cache already."""
    return {
        "prompt_tokens": chunk.prompt_len,
        "completion_tokens": completion_tokens,
        "total_tokens": chunk.prompt_len + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": chunk.cached_len},
    }


async def _events(
    gateway: Gateway,
    kind: _Kind,
    head: dict[str, Any],
    turn_id: str,
    first: TurnChunk,
    stream: AsyncIterator[TurnChunk],
    include_usage: bool,
) -> AsyncIterator[bytes]:
    head = head | {"object": kind.chunk_name}
    num_tokens, chunk = 0, first
    try:
        while True:
            num_tokens = max(num_tokens, chunk.index + len(chunk.tokens))
            body = head | {"choices": [kind.delta(gateway, chunk, first=chunk is first)]}
            event = _event(body | ({"usage": None} if include_usage else {}))
            yield f"id: {turn_id}:{num_tokens}\n".encode() + event
            if chunk.finish_reason:
                break
            chunk = await anext(stream)
        if include_usage:
            yield _event(head | {"choices": [], "usage": usage_of(chunk, num_tokens)})
        yield b"data: [DONE]\n\n"
    except HoldfastError as error:
        yield b"data: " + bytes(error_response(error).body) + b"\n\n"
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
