"""Chat messages as clients send them, and as chat templates take them."""

from __future__ import annotations

import json
from typing import Any

from holdfast.errors import InvalidRequest


def template_messages(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages as the chat template takes them. Raises InvalidRequest."""
    knows_developer = "developer" in template
    return [_as_text(_of_today(message, knows_developer=knows_developer)) for message in messages]


def _of_today(message: dict[str, Any], *, knows_developer: bool) -> dict[str, Any]:
    """The message with roles and fields that templates know: ``functions`` came before ``tools``."""
    role, call = message.get("role"), message.get("function_call")
    if role == "developer" and not knows_developer:
        return message | {"role": "system"}
    if role == "function":
        return message | {"role": "tool"}
    if role == "assistant" and isinstance(call, dict) and not message.get("tool_calls"):
        rest = {key: value for key, value in message.items() if key != "function_call"}
        return rest | {"tool_calls": [{"type": "function", "function": call}]}
    return message


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one text; clients may send typed parts, or calls in place of content."""
    if not isinstance(message.get("role"), str):
        raise InvalidRequest("messages: each message needs a role", "messages")
    content = message.get("content")
    if message["role"] == "assistant" and (calls := message.get("tool_calls")):
        message = message | {"tool_calls": _with_parsed_arguments(calls)}
        content = "" if content is None else content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise InvalidRequest("messages: only text content is supported", "messages")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise InvalidRequest("messages: content must be text", "messages")
    return message | {"content": content}


def _with_parsed_arguments(calls: Any) -> list[Any]:
    """Tool calls with their arguments as objects, which templates print; OpenAI's clients send them as text."""
    parsed = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest("messages: each of tool_calls needs a function with a name", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                raise InvalidRequest("messages: the arguments of a tool call are not JSON", "messages") from None
        parsed.append(call | {"function": function | {"arguments": arguments}})
    return parsed
