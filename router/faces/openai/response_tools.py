"""The tools of a response: flat, where chat's are nested."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from router.faces.openai.stored_response import StoredResponse
from router.faces.tools import FunctionBody, FunctionName, NamedFunction, NamedTool, ToolBody, ToolFields, ToolUse


class FlatTool(BaseModel):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(BaseModel):
    type: Literal["function"]
    name: FunctionName


def tool_use_of(response: StoredResponse) -> ToolUse:
    """Raises InvalidRequest for a choice of a tool that there is not."""
    choice: Any = response.tool_choice
    if isinstance(choice, dict):
        choice = NamedTool(function=NamedFunction(name=choice["name"]))
    tools = [ToolBody(function=FunctionBody.model_validate(tool)) for tool in response.tools]
    fields = ToolFields(tools=tools or None, tool_choice=choice if tools or choice != "auto" else None)
    fields.parallel_tool_calls = response.parallel_tool_calls
    return fields.tool_use()
