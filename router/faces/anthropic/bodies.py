"""Request bodies of ``/v1/messages``, and the conversation in them as chat templates take it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from holdfast.errors import InvalidRequest
from holdfast.v1 import session_pb2
from router.faces.fields import Count, CountOrNone, Name, OpenAIBody, Stops
from router.faces.grammars import of_schema
from router.faces.tools import MAX_TOOLS, FunctionName, ToolUse
from router.formats.style import Function

Text: TypeAlias = str | list[dict[str, Any]]


class Tool(BaseModel):
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool = False


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None


class Metadata(BaseModel):
    user_id: Name | None = None


class Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: Text


class JsonFormat(BaseModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    format: JsonFormat | None = None
    effort: str | None = None


class CountBody(OpenAIBody):
    """What the conversation is rendered from."""

    model: str = ""
    messages: list[Message] = Field(min_length=1)
    system: Text | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None

    @property
    def thinks(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    def tool_use(self) -> ToolUse:
        """Raises InvalidRequest for a choice of a tool that there is not."""
        choice = self.tool_choice or ToolChoice(type="auto")
        tools = self.tools or []
        if choice.type in ("any", "tool") and not tools:
            raise InvalidRequest("tool_choice: there are no tools to choose from", "tool_choice")
        if choice.type == "tool" and choice.name not in [tool.name for tool in tools]:
            raise InvalidRequest(f"tool_choice.name: there is no tool {choice.name!r}", "tool_choice.name")
        if choice.type == "none":
            tools = []
        return ToolUse(
            templates=[_template(tool) for tool in tools] or None,
            functions=[
                Function(tool.name, tool.input_schema, tool.strict)
                for tool in tools
                if choice.type != "tool" or tool.name == choice.name
            ],
            required=choice.type in ("any", "tool"),
            parallel=not choice.disable_parallel_tool_use and choice.type != "tool",
        )

    def conversation(self) -> list[dict[str, Any]]:
        """Raises InvalidRequest for content that is not text, a tool's use or its result."""
        system = [{"role": "system", "content": _text(self.system, "system")}] if self.system else []
        return system + [part for i, m in enumerate(self.messages) for part in _parts(m, f"messages.{i}.content")]

    @property
    def continues(self) -> bool:
        """The last message is the beginning of the answer."""
        return self.messages[-1].role == "assistant"

    def template_variables(self) -> dict[str, Any]:
        return {"enable_thinking": self.thinks}


class MessagesBody(CountBody):
    max_tokens: Count
    stream: bool = False
    temperature: float = Field(1.0, ge=0.0, le=1.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: CountOrNone = 0
    stop_sequences: Annotated[Stops, Field(default_factory=list)]
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None

    def sampling(self) -> session_pb2.Sampling:
        form = self.output_format or (self.output_config.format if self.output_config is not None else None)
        param = "output_format.schema" if self.output_format is not None else "output_config.format.schema"
        stops = [self.stop_sequences] if isinstance(self.stop_sequences, str) else self.stop_sequences
        return session_pb2.Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop=[stop for stop in stops if stop],
            grammar=of_schema(form.schema_, param) if form is not None else None,
        )


def _template(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = [block.get("text") for block in content or [] if isinstance(block, dict) and block.get("type") == "text"]
    if not isinstance(content, list) or len(parts) != len(content) or not all(isinstance(p, str) for p in parts):
        raise InvalidRequest(f"{where}: only text is supported", where)
    return "".join(str(part) for part in parts)


def _parts(message: Message, where: str) -> list[dict[str, Any]]:
    """One message as templates take it: a tool's results are messages of their own, before the user's text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in message.content:
        kind = block.get("type")
        if kind == "text":
            texts.append(_text([block], where))
        elif kind == "tool_result" and message.role == "user":
            content = _text(block.get("content", ""), where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif kind == "tool_use" and message.role == "assistant":
            if not isinstance(block.get("name"), str) or not isinstance(block.get("input"), dict):
                raise InvalidRequest(f"{where}: a tool_use needs a name and an input", where)
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind in ("thinking", "redacted_thinking") and message.role == "assistant":
            thoughts.append(str(block.get("thinking", "")))
        else:
            raise InvalidRequest(f"{where}: {kind} is not supported in a message of the {message.role}", where)
    text: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
    if calls:
        text["tool_calls"] = calls
    if thoughts:
        text["reasoning_content"] = "".join(thoughts)
    return results + ([text] if texts or calls or thoughts or not results else [])
