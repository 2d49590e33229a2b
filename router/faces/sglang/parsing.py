"""SGLang's endpoints that read a finished text: its calls, its reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from holdfast.errors import ConfigError, InvalidRequest
from router.core import RouterCore
from router.faces.tools import MAX_TOOLS, ToolBody
from router.formats.deltas import Delta
from router.formats.style import AnswerStyle, Function


class ParseCallsBody(BaseModel):
    text: str
    tools: list[ToolBody] = Field(max_length=MAX_TOOLS)
    tool_call_parser: str | None = None


class ReasoningBody(BaseModel):
    text: str
    reasoning_parser: str | None = None


def parsing_routes(core: RouterCore) -> APIRouter:
    """The endpoints over a router."""
    routes = APIRouter()

    @routes.post("/parse_function_call")
    async def parse_function_call(body: ParseCallsBody) -> dict[str, Any]:
        style = _style(core, body.tool_call_parser, "none", "tool_call_parser")
        functions = [Function(tool.function.name, tool.function.parameters, False) for tool in body.tools]
        delta = _parse(style, body.text, functions)
        names = [tool.function.name for tool in body.tools]
        calls = [
            {"tool_index": names.index(call.name) if call.name in names else -1, "name": call.name}
            | {"parameters": call.arguments}
            for call in delta.calls
        ]
        return {"normal_text": delta.text, "calls": calls}

    @routes.post("/separate_reasoning")
    async def separate_reasoning(body: ReasoningBody) -> dict[str, Any]:
        delta = _parse(_style(core, "none", body.reasoning_parser, "reasoning_parser"), body.text)
        return {"reasoning_text": delta.reasoning, "text": delta.text}

    return routes


def _style(core: RouterCore, calls: str | None, reasoning: str | None, param: str) -> AnswerStyle:
    """The checkpoint's formats, or those that the request names. Raises InvalidRequest."""
    try:
        return AnswerStyle(calls, reasoning, core.codec.chat_template)
    except ConfigError as error:
        raise InvalidRequest(error.message, param) from None


def _parse(style: AnswerStyle, text: str, functions: Sequence[Function] = ()) -> Delta:
    parser = style.parser("", calls=True, reasoning=True, functions=functions)
    delta = parser.push(text)
    delta.add(parser.finish())
    return delta
