"""A response's output as items: reasoning, messages and calls, with the events that announce them.

All of it follows from the output's tokens one by one, so that every router numbers the same events alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from router.faces.openai.chat_answer import call_id
from router.formats.deltas import CallDelta, Delta

Event: TypeAlias = tuple[str, dict[str, Any]]
"""An event's kind and its body."""


class ResponseItems:
    """Builds the items of one response while its output grows. One item is open at a time."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self._number = response_id.removeprefix("resp_")
        self.items: list[dict[str, Any]] = []
        self._open = ""
        self._logprobs: list[dict[str, Any]] = []

    def add_logprob(self, entry: dict[str, Any]) -> None:
        """The logprob of a token whose text comes next."""
        self._logprobs.append(entry)

    def _new_logprobs(self) -> list[dict[str, Any]]:
        """Of the tokens since the last text that was shown."""
        new, self._logprobs = self._logprobs, []
        return new

    def push(self, delta: Delta) -> Iterator[Event]:
        """Add new output. Yields its events."""
        if delta.reasoning:
            yield from self._open_item("reasoning", self._reasoning)
            self.items[-1]["content"][0]["text"] += delta.reasoning
            yield "reasoning_text.delta", self._place() | {"content_index": 0, "delta": delta.reasoning}
            self._new_logprobs()
        if delta.text.strip() or (delta.text and self._open == "message"):
            yield from self._open_item("message", self._message)
            part, logprobs = self.items[-1]["content"][0], self._new_logprobs()
            part["text"] += delta.text
            part["logprobs"] += logprobs
            yield "output_text.delta", self._place() | {"content_index": 0, "delta": delta.text, "logprobs": logprobs}
        for call in delta.calls:
            yield from self._open_item(f"call {call.index}", lambda call=call: self._call(call))
            self._new_logprobs()
            self.items[-1]["arguments"] += call.arguments
            if call.arguments:
                yield "function_call_arguments.delta", self._place() | {"delta": call.arguments}

    def finish(self, *, complete: bool) -> Iterator[Event]:
        """The output has ended. ``complete``: not cut by length. An answer without output is an empty message."""
        if not self.items:
            yield from self._open_item("message", self._message)
        if not complete:
            self.items[-1]["status"] = "incomplete"
        yield from self._close_item()

    def _open_item(self, kind: str, make: Any) -> Iterator[Event]:
        if self._open == kind:
            return
        yield from self._close_item()
        item = make()
        self._open = kind
        self.items.append(item)
        begun = item | {"content": []} if item["type"] != "function_call" else item
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": begun | {"status": "in_progress"}}
        if item["type"] == "message":
            part = item["content"][0] | {"logprobs": []}  # a copy: the item's own list grows
            yield "content_part.added", self._place() | {"content_index": 0, "part": part}

    def _close_item(self) -> Iterator[Event]:
        if not self._open:
            return
        item, self._open = self.items[-1], ""
        if item["type"] == "message":
            part = item["content"][0]
            text = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
            yield "output_text.done", self._place() | text
            yield "content_part.done", self._place() | {"content_index": 0, "part": part}
        elif item["type"] == "reasoning":
            yield "reasoning_text.done", self._place() | {"content_index": 0, "text": item["content"][0]["text"]}
        else:
            yield "function_call_arguments.done", self._place() | {"name": item["name"], "arguments": item["arguments"]}
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._number}" + (f"_{len(self.items)}" if self.items else "")

    def _reasoning(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": ""}]
        return {"id": self._id("rs"), "type": "reasoning", "status": "completed", "summary": [], "content": content}

    def _message(self) -> dict[str, Any]:
        content = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        head = {"id": self._id("msg"), "type": "message", "role": "assistant"}
        return head | {"status": "completed", "content": content}

    def _call(self, call: CallDelta) -> dict[str, Any]:
        return {
            "id": self._id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": call_id(self._response_id, call.index, short=False),
            "name": call.name,
            "arguments": "",
        }
