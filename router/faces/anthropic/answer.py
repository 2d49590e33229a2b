"""Answers of ``/v1/messages``: content blocks, whole or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from starlette.responses import JSONResponse

from holdfast.errors import HoldfastError
from router.faces.answer_reader import AnswerReader
from router.faces.http import sse_event
from router.faces.openai.chat_answer import call_id
from router.formats.deltas import CallDelta, Delta, Parser
from router.text import TextCodec
from router.turns.turn import TurnChunk

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "end_turn"}


def anthropic_error(error: HoldfastError) -> JSONResponse:
    """An error in Anthropic's format."""
    body = {"type": ERROR_TYPES.get(error.http_status, "api_error"), "message": error.message, "param": error.param}
    headers = {} if error.retry_after_s is None else {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return JSONResponse({"type": "error", "error": body}, error.http_status, headers)


class MessageAnswer:
    """One answer, while it grows. ``thinks``: its reasoning is shown."""

    def __init__(
        self, codec: TextCodec, new_parser: Callable[[], Parser] | None, turn_id: str, model: str, *, thinks: bool
    ) -> None:
        self._model, self._turn_id, self._thinks = model, turn_id, thinks
        self._reader = AnswerReader(codec, new_parser() if new_parser is not None else None)
        self._has_calls = False

    def parse(self, text: str, *, ended: bool) -> Delta:
        """What new text adds to the answer."""
        delta = self._reader.read(text, ended=ended)
        delta.reasoning = delta.reasoning if self._thinks else ""
        self._has_calls |= bool(delta.calls)
        return delta

    def whole(self, total: TurnChunk, text: str) -> dict[str, Any]:
        """The message of an answer that is complete."""
        delta = self.parse(text, ended=True)
        blocks: list[dict[str, Any]] = []
        if delta.reasoning:
            blocks.append({"type": "thinking", "thinking": delta.reasoning, "signature": ""})
        if delta.text.strip() or not (blocks or delta.calls):
            blocks.append({"type": "text", "text": delta.text})
        blocks += [self._tool_use(call) | {"input": _input_of(call.arguments)} for call in delta.calls]
        return self.head(total, len(total.tokens)) | {"content": blocks} | self.stop(total)

    def head(self, chunk: TurnChunk, num_tokens: int) -> dict[str, Any]:
        """The message without its content. ``num_tokens``: of the output so far."""
        return {
            "id": f"msg_{self._turn_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(chunk, num_tokens),
        }

    def stop(self, chunk: TurnChunk) -> dict[str, Any]:
        """Why the answer ended."""
        reason, sequence = STOP_REASONS.get(chunk.finish_reason, "end_turn"), None
        if chunk.finish_reason == "stop" and isinstance(chunk.matched, str):
            reason, sequence = "stop_sequence", chunk.matched
        elif chunk.finish_reason == "stop" and self._has_calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _tool_use(self, call: CallDelta) -> dict[str, Any]:
        number = call_id(self._turn_id, call.index, short=False).removeprefix("call_")
        return {"type": "tool_use", "id": f"toolu_{number}", "name": call.name, "input": {}}

    async def events(self, first: TurnChunk, rest: AsyncGenerator[TurnChunk, None]) -> AsyncIterator[bytes]:
        """The answer as a stream of events."""
        blocks, chunk, num_tokens = _Blocks(), first, 0
        try:
            yield _event({"type": "message_start", "message": self.head(first, 0)})
            yield _event({"type": "ping"})
            while True:
                num_tokens += len(chunk.tokens)
                delta = self.parse(chunk.text, ended=bool(chunk.finish_reason))
                for event in self._block_events(blocks, delta):
                    yield _event(event)
                if chunk.finish_reason:
                    break
                chunk = await anext(rest)
            for event in [*blocks.ensure_one(), *blocks.close()]:
                yield _event(event)
            yield _event({"type": "message_delta", "delta": self.stop(chunk), "usage": usage_of(chunk, num_tokens)})
            yield _event({"type": "message_stop"})
        except HoldfastError as error:
            yield _event(json.loads(bytes(anthropic_error(error).body)))
        finally:
            await rest.aclose()

    def _block_events(self, blocks: _Blocks, delta: Delta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if delta.reasoning:
            events += blocks.open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(blocks.delta({"type": "thinking_delta", "thinking": delta.reasoning}))
        text = blocks.space + delta.text
        # Space before a call or at the end is no block of its own.
        blocks.space = text if blocks.kind != "text" and not text.strip() else ""
        if text and not blocks.space:
            events += blocks.open("text", {"type": "text", "text": ""})
            events.append(blocks.delta({"type": "text_delta", "text": text}))
        for call in delta.calls:
            if call.name:
                events += blocks.open(f"call {call.index}", self._tool_use(call))
            if call.arguments:
                events.append(blocks.delta({"type": "input_json_delta", "partial_json": call.arguments}))
        return events


class _Blocks:
    """The content blocks of a stream: one is open at a time."""

    def __init__(self) -> None:
        self.kind = ""
        self.space = ""
        """Text so far before the next block."""
        self._index = -1

    def open(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        """Events that make a block of ``kind`` the open one, if it is not."""
        if kind == self.kind:
            return []
        events = self.close()
        self.kind, self._index = kind, self._index + 1
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def close(self) -> list[dict[str, Any]]:
        if not self.kind:
            return []
        self.kind = ""
        return [{"type": "content_block_stop", "index": self._index}]

    def ensure_one(self) -> list[dict[str, Any]]:
        """An answer has content, if only an empty text."""
        return self.open("text", {"type": "text", "text": ""}) if self._index < 0 else []


def usage_of(chunk: TurnChunk, num_tokens: int) -> dict[str, int]:
    """Anthropic counts what was read from the cache apart from the other input."""
    return {
        "input_tokens": chunk.prompt_len - chunk.cached_len,
        "cache_read_input_tokens": chunk.cached_len,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_tokens,
    }


def _input_of(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:  # cut by length
        return {}


def _event(body: dict[str, Any]) -> bytes:
    return sse_event(body, body["type"])
