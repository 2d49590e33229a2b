"""``/v1/completions`` and ``/v1/models``."""

from __future__ import annotations

import time
from array import array
from typing import Any, TypeAlias

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from holdfast.errors import InvalidRequest
from router.core import RouterCore
from router.faces.fields import MAX_TOP_LOGPROBS, Count, SessionHeader, TokenId, refuse_unsupported
from router.faces.http import Tenant
from router.faces.openai.choices import generate_choices
from router.faces.openai.generation import GenerationBody, check_model, generate
from router.inputs import of_tokens
from router.text import TextCodec
from router.turns.turn import Prepare, TurnChunk

Prompt: TypeAlias = str | list[TokenId] | list[str] | list[list[TokenId]]


class CompletionBody(GenerationBody):
    prompt: Prompt
    max_tokens: Count | None = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    suffix: str = ""
    best_of: int = 1

    @model_validator(mode="after")
    def _refuse_other_texts(self) -> CompletionBody:
        refuse_unsupported({"echo": self.echo, "suffix": bool(self.suffix), "best_of": self.best_of != 1})
        return self


def completion_routes(core: RouterCore) -> APIRouter:
    """The endpoints over a router."""
    routes = APIRouter()
    started = int(time.time())
    answer = _CompletionAnswer(core.codec)

    def model_card() -> dict[str, Any]:
        return {
            "id": core.config.served_model_name,
            "object": "model",
            "created": started,
            "owned_by": "holdfast",
            "max_model_len": core.fleet.context_len,
        }

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @routes.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(core, name)
        return model_card()

    @routes.post("/v1/completions")
    async def complete(http: Request, tenant: Tenant, body: CompletionBody, x_session_id: SessionHeader = "") -> Any:
        prompts = [_prepare(core, prompt) for prompt in _prompts(body.prompt)]
        sampling = body.sampling(body.logprobs)
        if len(prompts) * body.n > 1:
            return await generate_choices(core, http, tenant, body, answer, prompts, sampling, x_session_id)
        return await generate(core, http, tenant, body, answer, prompts[0], sampling, x_session_id)

    return routes


def _prompts(prompt: Prompt) -> list[str | list[int]]:
    """One text or list of tokens, or several."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt: must not be empty", "prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    return [ids] if ids else [item for item in prompt if not isinstance(item, int)]


def _prepare(core: RouterCore, prompt: str | list[int]) -> Prepare:
    return core.inputs.of_text(prompt, special=True) if isinstance(prompt, str) else of_tokens(array("i", prompt))


class _CompletionAnswer:
    """Plain completions' ``AnswerFormat``."""

    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    reasoning_tokens = 0

    def new_choice(self, turn_id: str) -> _CompletionAnswer:
        return self

    def whole(self, total: TurnChunk, text: str) -> dict[str, Any]:
        return {"index": 0, "finish_reason": total.finish_reason, "text": text, "logprobs": self._logprobs(total)}

    def delta(self, chunk: TurnChunk, *, first: bool) -> dict[str, Any]:
        finish = chunk.finish_reason or None
        return {"index": 0, "text": chunk.text, "finish_reason": finish, "logprobs": self._logprobs(chunk)}

    def _logprobs(self, chunk: TurnChunk) -> dict[str, Any] | None:
        if not chunk.logprobs:
            return None
        decode = self._codec.decode
        return {
            "tokens": [decode([item.token]) for item in chunk.logprobs],
            "token_logprobs": [item.logprob for item in chunk.logprobs],
            "top_logprobs": [{decode([t.token]): t.logprob for t in item.top} for item in chunk.logprobs],
            "text_offset": [],
        }
