"""From a stored response to the reader of its output: text, parser and items."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.v1 import session_pb2
from router.core import RouterCore
from router.faces.answer_reader import AnswerReader
from router.faces.openai.logprobs import logprob_entry
from router.faces.openai.response_items import Event, ResponseItems
from router.faces.openai.response_tools import tool_use_of
from router.faces.openai.stored_response import StoredResponse


class ResponseOutput:
    """Reads a response's output from its first token on."""

    def __init__(self, core: RouterCore, response: StoredResponse) -> None:
        self._codec = core.codec
        self._sampling = session_pb2.Sampling.FromString(response.sampling)
        self._text = core.codec.stream(self._sampling)
        self._items = ResponseItems(response.id)
        parser = None
        if self._sampling.show_special_tokens:
            # How any conversation's rendering ends says whether it has opened the reasoning.
            prompt = core.codec.render_chat([{"role": "user", "content": "x"}], None, response.template_variables)
            functions = tool_use_of(response).functions
            parser = core.style.parser(prompt, calls=bool(response.tools), reasoning=True, functions=functions)
        self._reader = AnswerReader(core.codec, parser)

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items so far."""
        return self._items.items

    @property
    def reasoning_tokens(self) -> int:
        """Of the output so far."""
        texts = [item["content"][0]["text"] for item in self.items if item["type"] == "reasoning"]
        return sum(len(self._codec.encode(text, special=False)) for text in texts)

    def read_all(self, response: StoredResponse) -> None:
        """Read the output of a response that has ended, whose events were sent as they came."""
        deque(self.push(response.output, response.token_logprobs, response.matched), maxlen=0)
        deque(self.finish(response.finish, response.matched), maxlen=0)

    def push(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[session_pb2.TokenLogprob] = (),
        matched: int | str | None = None,
    ) -> Iterator[Event]:
        """Read new tokens, one by one. ``matched``: what ended the output, if these end it with ``stop``.

        ``logprobs``: of all of them, or of the last ones: those that a lost router showed are not journaled.
        """
        first_known = len(tokens) - len(logprobs)
        for i, token in enumerate(tokens):
            if i >= first_known:
                self._items.add_logprob(logprob_entry(self._codec, logprobs[i - first_known]))
            text = self._text.push([token], matched if i == len(tokens) - 1 else None)
            yield from self._items.push(self._reader.read(text, ended=False))

    def finish(self, finish: str, matched: int | str | None) -> Iterator[Event]:
        """The output has ended."""
        if matched is None and finish == "stop":
            matched = self._text.stopped_by
        text = self._text.finish(matched if isinstance(matched, str) else None)
        yield from self._items.push(self._reader.read(text, ended=True))
        yield from self._items.finish(complete=finish != "length")
