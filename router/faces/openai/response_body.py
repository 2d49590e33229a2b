"""Bodies of requests to ``/v1/responses``."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field, model_validator

from holdfast.errors import InvalidRequest
from holdfast.v1 import session_pb2
from router.faces.fields import BACKGROUND_TIER, MAX_TOP_LOGPROBS, Count, Int64, OpenAIBody, ServiceTier
from router.faces.grammars import JsonObjectFormat, JsonSchema, TextFormat, of_schema, only_one
from router.faces.openai.response_tools import FlatChoice, FlatTool
from router.faces.openai.stored_response import StoredResponse
from router.faces.sampling import SamplingFields
from router.faces.tools import MAX_TOOLS, FunctionName

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
"""The part that a request may ``include``; what else the API names does not exist here."""


class FunctionCallItem(BaseModel):
    """A call of an earlier answer, sent back."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str
    id: str | None = None

    def stored(self) -> dict[str, Any]:
        """The item as it is stored."""
        return self.model_dump() | {"id": self.id or f"fc_{uuid.uuid4().hex}", "status": "completed"}


class FunctionOutputItem(BaseModel):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None

    def stored(self) -> dict[str, Any]:
        """The item as it is stored. Raises InvalidRequest."""
        parts = self.output if isinstance(self.output, list) else []
        if not all(isinstance(part.get("text"), str) for part in parts):
            raise InvalidRequest("input: only text content is supported", "input")
        return self.model_dump() | {"id": self.id or f"fco_{uuid.uuid4().hex}", "status": "completed"}


class ReasoningItem(BaseModel, extra="allow"):
    """The reasoning of an earlier answer, sent back. It is not shown to the model again."""

    type: Literal["reasoning"]
    id: str | None = None

    def stored(self) -> dict[str, Any]:
        """The item as it is stored."""
        return self.model_dump() | {"id": self.id or f"rs_{uuid.uuid4().hex}"}


class InputItem(BaseModel):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    id: str | None = None

    def stored(self) -> dict[str, Any]:
        """The item as it is stored. Raises InvalidRequest."""
        kind = "output_text" if self.role == "assistant" else "input_text"
        parts: list[dict[str, Any]] = (
            [{"type": kind, "text": self.content}] if isinstance(self.content, str) else self.content
        )
        for part in parts:
            if part.get("type") not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
                raise InvalidRequest("input: only text content is supported", "input")
        item_id = self.id or f"msg_{uuid.uuid4().hex}"
        return {"id": item_id, "type": "message", "role": self.role, "status": "completed", "content": parts}


Item: TypeAlias = FunctionCallItem | FunctionOutputItem | ReasoningItem | InputItem


class ConversationRef(BaseModel):
    id: str


class Reasoning(BaseModel):
    effort: str | None = None
    summary: str | None = None


class SchemaFormat(JsonSchema):
    """As chat's, but flat."""

    type: Literal["json_schema"]


class TextSettings(BaseModel):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None

    def grammar(self) -> session_pb2.Grammar | None:
        if isinstance(self.format, SchemaFormat):
            return only_one(of_schema(self.format.schema_ or {"type": "object"}, "text.format.schema"))
        return of_schema({"type": "object"}, "text.format") if isinstance(self.format, JsonObjectFormat) else None


class ResponseBody(OpenAIBody, SamplingFields):
    model: str = ""
    input: str | list[Item] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    max_output_tokens: Count | None = None
    seed: Int64 | None = None
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    tools: list[FlatTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | FlatChoice = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = Field(None, ge=1)
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: TextSettings | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    service_tier: ServiceTier | None = None

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> ResponseBody:
        if self.previous_response_id and self.conversation:
            raise InvalidRequest("set only one of previous_response_id and conversation", "conversation")
        if self.background and not self.store:
            raise InvalidRequest("background can only be used when `store` is true", "store")
        return self

    def items(self) -> list[dict[str, Any]]:
        """The input as stored items."""
        given = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return [item.stored() for item in given]

    def _template_variables(self) -> dict[str, Any]:
        effort = self.reasoning.effort if self.reasoning is not None else None
        return ({"reasoning_effort": effort} if effort else {}) | (self.chat_template_kwargs or {})

    def response(self, model: str) -> StoredResponse:
        """The response that the request creates."""
        response_id = f"resp_{uuid.uuid4().hex}"
        conversation = self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation
        sampling = self.sampling_message(
            seed=self.seed,
            max_tokens=self.max_output_tokens,
            logprobs=self.top_logprobs if LOGPROBS in (self.include or ()) else None,
            background=self.service_tier == BACKGROUND_TIER,
            grammar=self.text.grammar() if self.text is not None else None,
        )
        echoed = self.model_dump(include={"temperature", "top_p", "max_output_tokens", "metadata"})
        if self.text is not None and self.text.format is not None:
            echoed["text"] = self.text.model_dump(exclude_none=True, by_alias=True)
        return StoredResponse(
            id=response_id,
            created_at=int(time.time()),
            model=model,
            session_id=response_id,
            input=self.items(),
            instructions=self.instructions,
            previous_response_id=self.previous_response_id,
            conversation=conversation,
            background=self.background,
            stored=self.store,
            truncates=self.truncation == "auto",
            settings=echoed,
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or []],
            tool_choice=self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.model_dump(),
            # A limit of one call is one that a grammar can keep.
            parallel_tool_calls=self.parallel_tool_calls and self.max_tool_calls != 1,
            template_variables=self._template_variables(),
            sampling=sampling.SerializeToString(),
        )
