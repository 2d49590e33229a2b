"""From a stored response to the reader of its output: text, parser and items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.v1 import session_pb2
from router.core import RouterCore
from router.faces.openai.response_items import Event, ResponseItems
from router.faces.openai.stored_response import StoredResponse
from router.formats.deltas import Delta


class ResponseOutput:
    """Reads a response's output from its first token on."""

    def __init__(self, core: RouterCore, response: StoredResponse) -> None:
        self._codec = core.codec
        self._sampling = session_pb2.Sampling.FromString(response.sampling)
        self._text = core.codec.stream(self._sampling)
        self._items = ResponseItems(response.id)
        self._is_parsed = self._sampling.show_special_tokens
        if self._is_parsed:
            # How any conversation's rendering ends says whether it has opened the reasoning.
            prompt = core.codec.render_chat([{"role": "user", "content": "x"}], None, response.template_variables)
            self._parser = core.style.parser(prompt, calls=bool(response.tools), reasoning=True)

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items so far."""
        return self._items.items

    @property
    def reasoning_tokens(self) -> int:
        """Of the output so far."""
        texts = [item["content"][0]["text"] for item in self.items if item["type"] == "reasoning"]
        return sum(len(self._codec.encode(text, special=False)) for text in texts)

    def push(self, tokens: Sequence[int], matched: int | str | None = None) -> Iterator[Event]:
        """Read new tokens, one by one. ``matched``: what ended the output, if these end it with ``stop``."""
        for i, token in enumerate(tokens):
            is_last = i == len(tokens) - 1
            yield from self._items.push(self._parse(self._text.push([token], matched if is_last else None)))

    def finish(self, finish: str, matched: int | str | None) -> Iterator[Event]:
        """The output has ended."""
        if matched is None and finish == "stop":
            matched = self._text.stopped_by
        delta = self._parse(self._text.finish(matched if isinstance(matched, str) else None))
        if self._is_parsed:
            rest = self._parser.finish()
            rest.text = self._codec.without_special(rest.text)
            delta.add(rest)
        yield from self._items.push(delta)
        yield from self._items.finish(complete=finish != "length")

    def _parse(self, text: str) -> Delta:
        if not self._is_parsed:
            return Delta(text)
        delta = self._parser.push(text)
        delta.text = self._codec.without_special(delta.text)
        return delta
