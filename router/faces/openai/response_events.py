"""A response as JSON, and as a stream of events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from holdfast.errors import HoldfastError
from router.faces.openai.response_turns import ResponseTurns
from router.faces.openai.stored_response import StoredResponse, output_items
from router.turns.turn import TurnChunk

FIRST_DELTA = 4
"""Sequence number of the first token's event. A delta has the number of its last token, so that a cursor
means the same token on every router."""


def response_json(response: StoredResponse) -> dict[str, Any]:
    """A response in OpenAI's format."""
    reason = {"reason": "max_output_tokens"} if response.status == "incomplete" else None
    return {
        "id": response.id,
        "object": "response",
        "created_at": response.created_at,
        "status": response.status,
        "background": response.background,
        "error": response.error,
        "incomplete_details": reason,
        "instructions": response.instructions,
        "model": response.model,
        "output": output_items(response),
        "parallel_tool_calls": False,
        "previous_response_id": response.previous_response_id,
        "conversation": {"id": response.conversation} if response.conversation else None,
        "store": response.stored,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "truncation": "disabled",
        "usage": response.usage,
        **response.settings,
    }


async def response_events(
    responses: ResponseTurns,
    response: StoredResponse,
    tenant: str,
    chunks: AsyncGenerator[TurnChunk, None],
    after: int,
) -> AsyncIterator[bytes]:
    """The response's events with sequence numbers greater than ``after``."""
    item = {"id": response.message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    part = {"type": "output_text", "text": "", "annotations": []}
    place = {"item_id": response.message_id, "output_index": 0, "content_index": 0}
    begun = response_json(response) | {"status": "in_progress", "output": [], "usage": None}

    def event(number: int, kind: str, **body: Any) -> bytes:
        if number <= after:
            return b""
        data = json.dumps({"type": f"response.{kind}", "sequence_number": number} | body, separators=(",", ":"))
        return f"event: response.{kind}\ndata: {data}\n\n".encode()

    number = FIRST_DELTA
    try:
        yield event(0, "created", response=begun)
        yield event(1, "in_progress", response=begun)
        yield event(2, "output_item.added", output_index=0, item=item)
        yield event(3, "content_part.added", **place, part=part)
        async for chunk in chunks:
            number = max(number, FIRST_DELTA + chunk.index + len(chunk.tokens))
            if chunk.text:
                yield event(number - 1, "output_text.delta", **place, delta=chunk.text, logprobs=[])
        if response.stored:
            response = await responses.get(response.id, tenant)
        if response.status in ("completed", "incomplete"):
            whole = output_items(response)[0]
            yield event(number, "output_text.done", **place, text=response.text, logprobs=[])
            yield event(number + 1, "content_part.done", **place, part=whole["content"][0])
            yield event(number + 2, "output_item.done", output_index=0, item=whole)
        yield event(number + 3, response.status, response=response_json(response))
    except HoldfastError as error:
        body = {"code": error.code, "message": error.message, "param": None}
        data = json.dumps({"type": "error", "sequence_number": number + 3} | body)
        yield f"event: error\ndata: {data}\n\n".encode()
    finally:
        await chunks.aclose()
