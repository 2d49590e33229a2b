"""Calls between markers amid text, and the bodies that are not JSON alone."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from router.formats.deltas import CallDelta, Delta, held_back
from router.formats.json_calls import Body, JsonNesting

GEMMA_PAIR = r"([\w.\-]+):(?:<escape>(.*?)<escape>|([^,{}\[\]]+|\[.*?\]|\{.*?\}))(?:,|$)"


class TaggedCalls:
    """Text, and calls between ``begin`` and ``end``, or without ``end`` to the next ``begin`` or the output's end.

    ``body`` makes the reader of one pair of markers. ``at_start``: these begin a call only as the output's first
    characters, and are part of its body.
    """

    def __init__(
        self,
        begin: str,
        end: str,
        body: Callable[[Callable[[], int]], Body],
        *,
        at_start: str = "",
        dropped: tuple[str, ...] = (),
    ) -> None:
        self._begin, self._end, self._new_body, self._at_start = begin, end, body, at_start
        self._dropped = dropped
        self._body: Body | None = None
        self._held = ""
        self._num_calls = 0
        self._started = False

    def push(self, text: str) -> Delta:
        delta, self._held = Delta(), self._held + text
        if not self._started and self._held.strip():
            self._started = True
            if self._at_start and self._held.lstrip()[0] in self._at_start:
                self._body = self._new_body(self._next_index)
        while self._started and self._held:
            marker = (self._end or self._begin) if self._body is not None else self._begin
            at = self._held.find(marker) if marker else -1
            waited_for = (marker,) if self._body is not None else (marker, *self._dropped)
            stop = at if at >= 0 else len(self._held) - max(held_back(self._held, m) for m in waited_for)
            self._pass_on(self._held[:stop], delta)
            self._held = self._held[stop:]
            if at < 0:
                break
            self._held = self._held[len(marker) :]
            self._end_body(delta)
            if marker == self._begin:
                self._body = self._new_body(self._next_index)
        return delta

    def finish(self) -> Delta:
        delta, held = Delta(), self._held
        self._held = ""
        if self._body is None:  # else it is the beginning of an end marker
            self._pass_on(held, delta)
        self._end_body(delta)
        return delta

    def _pass_on(self, text: str, delta: Delta) -> None:
        if self._body is not None:
            delta.add(self._body.push(text))
            return
        for marker in self._dropped:
            text = text.replace(marker, "")
        if not (self._num_calls and text.isspace()):  # between two calls
            delta.text += text

    def _end_body(self, delta: Delta) -> None:
        if self._body is not None:
            delta.add(self._body.finish())
            self._body = None

    def _next_index(self) -> int:
        self._num_calls += 1
        return self._num_calls - 1


class NamedCall:
    """A name, ``separator``, and the arguments as JSON, which are passed on as they are written."""

    def __init__(self, next_index: Callable[[], int], separator: str, name: Callable[[str], str]) -> None:
        self._next_index, self._separator, self._name_of = next_index, separator, name
        self._head = ""
        self._index: int | None = None
        self._nesting = JsonNesting()
        self._ended = False

    def push(self, text: str) -> Delta:
        delta = Delta()
        if self._index is None:
            self._head += text
            at = self._head.find("{", self._head.find(self._separator) if self._separator else 0)
            if at < 0 or self._separator not in self._head:
                return delta
            self._index, text = self._next_index(), self._head[at:]
            delta.calls.append(CallDelta(self._index, self._name_of(self._head[:at])))
        arguments = ""
        for char in text:
            if self._ended:
                break
            self._nesting.push(char)
            arguments += char
            self._ended = self._nesting.depth == 0 and not self._nesting.in_string
        if arguments:
            delta.add(Delta(calls=[CallDelta(self._index, "", arguments)]))
        return delta

    def finish(self) -> Delta:
        return Delta(self._head if self._index is None else "")


class WholeCalls:
    """Calls in a notation that is read when it is complete. ``read`` raises ValueError for what is no call."""

    def __init__(self, next_index: Callable[[], int], read: Callable[[str], list[tuple[str, dict[str, Any]]]]) -> None:
        self._next_index, self._read = next_index, read
        self._text = ""

    def push(self, text: str) -> Delta:
        self._text += text
        return Delta()

    def finish(self) -> Delta:
        try:
            calls = self._read(self._text)
        except (ValueError, SyntaxError):
            return Delta(self._text)
        return Delta(
            calls=[
                CallDelta(self._next_index(), name, json.dumps(arguments, ensure_ascii=False))
                for name, arguments in calls
            ]
        )


def read_pythonic(text: str) -> list[tuple[str, dict[str, Any]]]:
    """``[f(x=1), g(y="a")]``, as Llama 4 and others write calls."""
    parsed = ast.parse(text.strip(), mode="eval").body
    calls = parsed.elts if isinstance(parsed, ast.List) else [parsed]
    found = []
    for call in calls:
        if not isinstance(call, ast.Call) or call.args or any(k.arg is None for k in call.keywords):
            raise ValueError("not a list of calls")
        found.append((ast.unparse(call.func), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}))
    if not found:
        raise ValueError("no call")
    return found


def read_glm(text: str, texts: Mapping[str, Collection[str]]) -> list[tuple[str, dict[str, Any]]]:
    """``name`` and pairs of ``<arg_key>`` and ``<arg_value>``, as GLM-4.5 writes a call.

    ``texts``: by function, the arguments that are texts even if they look like numbers.
    """
    name = re.split(r"<arg_key>|\n", text.strip(), maxsplit=1)[0].strip()
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", text, re.DOTALL)
    if not name:
        raise ValueError("a call without a name")
    known = texts.get(name, ())
    named = [(key.strip(), value) for key, value in pairs]
    return [(name, {key: value if key in known else _json_or_text(value) for key, value in named})]


def read_gemma(text: str) -> list[tuple[str, dict[str, Any]]]:
    """``call:name{key:<escape>text<escape>,key:1}``, as FunctionGemma writes a call."""
    match = re.fullmatch(r"\s*call:\s*([\w.\-]+)\s*\{(.*)\}\s*", text, re.DOTALL)
    if match is None:
        raise ValueError("not a call")
    pairs = re.findall(
        r"([\w.\-]+):(?:<escape>(.*?)<escape>|([^,{}\[\]]+|\[.*?\]|\{.*?\}))(?:,|$)", match[2], re.DOTALL
    )
    return [(match[1], {key: text or _json_or_text(other) for key, text, other in pairs})]


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
