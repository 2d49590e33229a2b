"""A response as JSON, and as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from holdfast.errors import HoldfastError
from router.core import RouterCore
from router.faces.http import sse_event
from router.faces.openai.response_output import ResponseOutput
from router.faces.openai.response_turns import ResponseTurns
from router.faces.openai.stored_response import StoredResponse
from router.turns.turn import TurnChunk


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
        "output": response.items if response.status in ("completed", "incomplete") else [],
        "parallel_tool_calls": response.parallel_tool_calls,
        "previous_response_id": response.previous_response_id,
        "conversation": {"id": response.conversation} if response.conversation else None,
        "store": response.stored,
        "text": {"format": {"type": "text"}},
        "tool_choice": response.tool_choice,
        "tools": response.tools,
        "truncation": "auto" if response.truncates else "disabled",
        "usage": response.usage,
        **response.settings,
    }


async def response_events(
    core: RouterCore,
    responses: ResponseTurns,
    response: StoredResponse,
    tenant: str,
    chunks: AsyncGenerator[TurnChunk, None],
    after: int,
) -> AsyncIterator[bytes]:
    """The response's events with sequence numbers greater than ``after``. ``chunks`` begin at the first token."""
    begun = response_json(response) | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    output, number = ResponseOutput(core, response), -1

    def event(kind: str, body: dict[str, Any]) -> bytes:
        nonlocal number
        number += 1
        if number <= after:
            return b""
        kind = f"response.{kind}"
        return sse_event({"type": kind, "sequence_number": number} | body, kind)

    try:
        yield event("created", {"response": begun})
        yield event("in_progress", {"response": begun})
        async for chunk in chunks:
            for kind, body in output.push(chunk.tokens, chunk.logprobs, chunk.matched):
                yield event(kind, body)
            if chunk.finish_reason in ("stop", "length"):
                for kind, body in output.finish(chunk.finish_reason, chunk.matched):
                    yield event(kind, body)
        if response.stored:
            response = await responses.get(response.id, tenant)
        yield event(response.status, {"response": response_json(response)})
    except HoldfastError as error:
        body = {"code": error.code, "message": error.message, "param": error.param}
        yield sse_event({"type": "error", "sequence_number": number + 1} | body, "error")
    finally:
        await chunks.aclose()
