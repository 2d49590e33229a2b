"""``/v1/chat/completions``."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, model_validator

from holdfast.errors import InvalidRequest
from router.core import RouterCore
from router.faces.constrain import constrain
from router.faces.fields import MAX_TOP_LOGPROBS, Count, PredictedText, SessionHeader
from router.faces.http import Tenant
from router.faces.messages import template_messages
from router.faces.openai.chat_answer import ChatAnswer
from router.faces.openai.choices import generate_choices
from router.faces.openai.generation import GenerationBody, generate
from router.faces.tools import ToolFields


class PredictedPart(BaseModel):
    type: Literal["text"] = "text"
    text: PredictedText


class Prediction(BaseModel):
    """What the output may repeat: OpenAI's predicted outputs."""

    type: Literal["content"] = "content"
    content: PredictedText | list[PredictedPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(GenerationBody, ToolFields):
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    continue_final_message: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _refuse_a_stream_of_prompt_logprobs(self) -> ChatBody:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs: is known at the end; do not stream", "prompt_logprobs")
        return self


def chat_routes(core: RouterCore) -> APIRouter:
    """The endpoint over a router."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat(http: Request, tenant: Tenant, body: ChatBody, x_session_id: SessionHeader = "") -> Any:
        use = body.tool_use()
        if body.continue_final_message and body.messages[-1].get("role") != "assistant":
            raise InvalidRequest("continue_final_message: the last message must be the assistant's", "messages")
        text = await core.inputs.render_chat(
            template_messages(body.messages, core.codec.chat_template),
            use.templates,
            body.template_variables(),
            continues=body.continue_final_message,
        )
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        sampling = body.sampling(body.top_logprobs if body.logprobs else None)
        if body.prompt_logprobs is not None:
            sampling.logprob_start = 0
            sampling.logprobs = max(sampling.logprobs, body.prompt_logprobs)
        if body.prediction is not None:
            sampling.prediction = await core.inputs.prediction(body.prediction.text)
        answer = ChatAnswer(
            core.codec,
            constrain(core, use, text, sampling, reasoning=body.separate_reasoning),
            legacy=body.is_legacy,
            short_ids=core.style.calls is not None and core.style.calls.short_ids,
            shows_logprobs=body.logprobs,
            shows_ids=body.return_token_ids,
            scores_prompt=body.prompt_logprobs is not None,
        )
        prepare = core.inputs.of_text(text, special=False)
        if body.n > 1:
            return await generate_choices(core, http, tenant, body, answer, [prepare], sampling, x_session_id)
        return await generate(core, http, tenant, body, answer, prepare, sampling, x_session_id)

    return routes
