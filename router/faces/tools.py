"""The tools of a chat request, and how its answer may use them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from holdfast.errors import InvalidRequest
from router.faces.fields import OpenAIBody
from router.formats.style import Function

MAX_TOOLS = 128
FunctionName: TypeAlias = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]


class FunctionBody(BaseModel, extra="allow"):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(BaseModel, extra="allow"):
    type: Literal["function"] = "function"
    function: FunctionBody


class NamedFunction(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"] = "function"
    function: NamedFunction


class ToolFields(OpenAIBody):
    tools: list[ToolBody] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    functions: list[FunctionBody] | None = Field(None, max_length=MAX_TOOLS)
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    separate_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None

    @property
    def is_legacy(self) -> bool:
        """The request uses ``functions``, which ``tools`` replaced."""
        return self.functions is not None

    def tool_use(self) -> ToolUse:
        """Raises InvalidRequest for a choice of a tool that there is not."""
        tools = self.tools if not self.is_legacy else [ToolBody(function=f) for f in self.functions or []]
        choice = self.tool_choice if not self.is_legacy else self.function_call
        param = "function_call" if self.is_legacy else "tool_choice"
        named = choice.function.name if isinstance(choice, NamedTool) else getattr(choice, "name", None)
        if (named or choice == "required") and not tools:
            raise InvalidRequest(f"{param}: there are no tools to choose from", param)
        if named and named not in [tool.function.name for tool in tools or []]:
            raise InvalidRequest(f"{param}: there is no tool {named!r}", param)
        if choice == "none":
            tools = None
        return ToolUse(
            templates=[tool.model_dump(exclude_none=True) for tool in tools or []] or None,
            functions=[
                Function(tool.function.name, tool.function.parameters, bool(tool.function.strict))
                for tool in tools or []
                if named in (None, tool.function.name)
            ],
            required=bool(named) or choice == "required",
            parallel=self.parallel_tool_calls and not named and not self.is_legacy,
        )

    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template."""
        given = {"enable_thinking": self.enable_thinking, "reasoning_effort": self.reasoning_effort}
        return {name: value for name, value in given.items() if value is not None} | (self.chat_template_kwargs or {})


class ToolUse(BaseModel):
    """The tools that an answer may call."""

    templates: list[dict[str, Any]] | None
    """As chat templates take them."""
    functions: list[Function]
    required: bool
    parallel: bool
