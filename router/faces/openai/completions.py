"""``/v1/completions`` and ``/v1/models``."""

from __future__ import annotations

import time
from array import array
from typing import Any, TypeAlias

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from holdfast.errors import InvalidRequest
from router.core import RouterCore
from router.faces.fields import MAX_TOP_LOGPROBS, CountOrNone, SessionHeader, TokenId, refuse_unsupported
from router.faces.http import Tenant
from router.faces.openai.choices import generate_choices
from router.faces.openai.completion_answer import CompletionAnswer
from router.faces.openai.generation import GenerationBody, check_model, generate
from router.faces.several import MAX_TURNS
from router.inputs import of_tokens
from router.turns.turn import Prepare

Prompt: TypeAlias = str | list[TokenId] | list[str] | list[list[TokenId]]


class CompletionBody(GenerationBody):
    prompt: Prompt
    max_tokens: CountOrNone | None = 16
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    suffix: str = ""
    best_of: int | None = Field(None, ge=1, le=MAX_TURNS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _refuse_what_cannot_be(self) -> CompletionBody:
        refuse_unsupported({"suffix": bool(self.suffix)})
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(f"best_of: must be at least n, {self.n}", "best_of")
        for name, used in (("best_of", (self.best_of or 0) > self.n), ("prompt_logprobs", self.prompt_logprobs)):
            if used not in (None, False) and self.stream:
                raise InvalidRequest(f"{name}: is known at the end; do not stream", name)
        return self


def completion_routes(core: RouterCore) -> APIRouter:
    """The endpoints over a router."""
    routes = APIRouter()
    started = int(time.time())

    def model_card() -> dict[str, Any]:
        return {
            "id": core.config.served_model_name,
            "object": "model",
            "created": started,
            "owned_by": "holdfast",
            "root": core.config.served_model_name,
            "parent": None,
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
        prompts = [_prepare(core, prompt, special=body.add_special_tokens) for prompt in _prompts(body.prompt)]
        sampling = body.sampling(body.logprobs)
        if (body.echo and body.logprobs is not None) or body.prompt_logprobs is not None:
            sampling.logprob_start = 0
            sampling.logprobs = max(body.logprobs or 0, body.prompt_logprobs or 0)
        answer = CompletionAnswer(
            core.codec,
            echo=body.echo,
            shows_logprobs=body.logprobs is not None,
            shows_ids=body.return_token_ids,
            num_prompt_logprobs=body.prompt_logprobs,
        )
        if len(prompts) * (body.best_of or body.n) > 1:
            return await generate_choices(
                core, http, tenant, body, answer, prompts, sampling, x_session_id, best_of=body.best_of
            )
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


def _prepare(core: RouterCore, prompt: str | list[int], *, special: bool) -> Prepare:
    return core.inputs.of_text(prompt, special=special) if isinstance(prompt, str) else of_tokens(array("i", prompt))
