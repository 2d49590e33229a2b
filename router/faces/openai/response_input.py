"""A response's input: all items up to it, rendered for the model, and cut to what fits if the request says so."""

from __future__ import annotations

from typing import Any

from holdfast.errors import PromptTooLong
from holdfast.v1 import session_pb2
from router.core import RouterCore
from router.faces.messages import template_messages
from router.faces.openai.stored_response import StoredResponse
from router.faces.tools import ToolUse


async def render_input(
    core: RouterCore,
    response: StoredResponse,
    items: list[dict[str, Any]],
    use: ToolUse,
    sampling: session_pb2.Sampling,
) -> str:
    """The conversation in the model's template. Raises InvalidRequest.

    With ``truncation: auto`` it begins at the first user message from which it fits into the context, with room for
    the output, of at most half the context.
    """
    messages = messages_of(items)
    system = [{"role": "system", "content": response.instructions}] if response.instructions else []

    async def rendered(start: int) -> str:
        kept = template_messages([*system, *messages[start:]], core.codec.chat_template)
        return await core.inputs.render_chat(kept, use.templates, response.template_variables)

    context_len = core.fleet.context_len
    if not (response.truncates and context_len):
        return await rendered(0)
    room = context_len - min(sampling.max_tokens or 1, context_len // 2)

    async def fits(start: int) -> bool:
        try:
            return len(await core.inputs.encode(await rendered(start), special=False)) <= room
        except PromptTooLong:
            return False

    starts = [0, *(i for i, message in enumerate(messages) if i and message["role"] == "user")]
    low, high = 0, len(starts) - 1  # the last one is sent as it is, and refused if even it is too long
    while low < high:
        middle = (low + high) // 2
        if await fits(starts[middle]):
            high = middle
        else:
            low = middle + 1
    return await rendered(starts[low])


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as chat messages: the calls of an answer belong to its message, its reasoning is not repeated."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = {"id": item["call_id"], "type": "function"}
            call["function"] = {"name": item["name"], "arguments": item["arguments"]}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        elif kind == "message":
            messages.append({"role": item["role"], "content": _text(item["content"])})
    return messages


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
