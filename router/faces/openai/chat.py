"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from holdfast.v1 import session_pb2
from router.core import RouterCore
from router.faces.fields import MAX_TOP_LOGPROBS, Count, SessionHeader
from router.faces.http import Tenant
from router.faces.messages import template_messages
from router.faces.openai.choices import generate_choices
from router.faces.openai.generation import GenerationBody, generate
from router.text import TextCodec
from router.turns.turn import TurnChunk


class ChatBody(GenerationBody):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)


def chat_routes(core: RouterCore) -> APIRouter:
    """The endpoint over a router."""
    routes = APIRouter()
    answer = _ChatAnswer(core.codec)

    @routes.post("/v1/chat/completions")
    async def chat(http: Request, tenant: Tenant, body: ChatBody, x_session_id: SessionHeader = "") -> Any:
        text = core.codec.render_chat(template_messages(body.messages))
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        sampling = body.sampling(body.top_logprobs if body.logprobs else None)
        prepare = core.inputs.of_text(text, special=False)
        if body.n > 1:
            return await generate_choices(core, http, tenant, body, answer, [prepare], sampling, x_session_id)
        return await generate(core, http, tenant, body, answer, prepare, sampling, x_session_id)

    return routes


class _ChatAnswer:
    """Chat's ``AnswerFormat``."""

    id_prefix, object_name, chunk_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def choice(self, total: TurnChunk, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "finish_reason": total.finish_reason, "message": message, "logprobs": self._logprobs(total)}

    def delta(self, chunk: TurnChunk, *, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        body: dict[str, Any] = {"index": 0, "delta": role | {"content": chunk.text}}
        return body | {"finish_reason": chunk.finish_reason or None, "logprobs": self._logprobs(chunk)}

    def _logprobs(self, chunk: TurnChunk) -> dict[str, Any] | None:
        if not chunk.logprobs:
            return None
        return {"content": [self._logprob(item) for item in chunk.logprobs], "refusal": None}

    def _logprob(self, item: session_pb2.TokenLogprob) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._codec.decode([token])
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return entry(item.token, item.logprob) | {"top_logprobs": [entry(t.token, t.logprob) for t in item.top]}
