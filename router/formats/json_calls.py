"""Calls written as JSON, read while they are written: the name first, then the arguments as they come."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from router.formats.deltas import CallDelta, Delta

ARGUMENTS = ("arguments", "parameters")
SEPARATORS = frozenset("[], ;\n\r\t")
"""What may be between the objects of several calls."""


class Body(Protocol):
    """Reads what is between the markers of a call, or of several."""

    def push(self, text: str) -> Delta:
        """What this text completes."""

    def finish(self) -> Delta:
        """The end marker, or the output's end."""


class JsonNesting:
    """How deep a JSON text is nested at its end, and whether that is inside a string."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def push(self, char: str) -> None:
        if self.in_string:
            self.in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class JsonCalls:
    """Objects ``{"name": ..., "arguments": {...}}``: alone, in a list, or one after another.

    The arguments of a call whose name comes first are passed on as they are written. What is not a call is text.
    """

    def __init__(self, next_index: Callable[[], int]) -> None:
        self._next_index = next_index
        self._between = ""
        self._begin_object()

    def _begin_object(self) -> None:
        self._nesting = JsonNesting()
        self._object = ""
        self._key, self._value, self._in_value = "", "", False
        self._name: str | None = None
        self._arguments = "{}"
        self._index: int | None = None
        """Of the call whose arguments are passed on."""
        self._passes_on = False

    def push(self, text: str) -> Delta:
        delta = Delta()
        for char in text:
            if self._object or char == "{":
                self._push_char(char, delta)
            else:
                self._between += char
        return delta

    def finish(self) -> Delta:
        text = "" if set(self._between) <= SEPARATORS else self._between
        if self._index is None:
            text += self._object
        self._between, self._object = "", ""
        return Delta(text)

    def _push_char(self, char: str, delta: Delta) -> None:
        nesting, outside = self._nesting, not self._nesting.in_string
        ends_member = outside and nesting.depth == 1 and char in ",}"
        nesting.push(char)
        self._object += char
        if ends_member:
            self._end_member()
        elif self._in_value:
            self._push_value(char, delta)
        elif outside and char == ":" and nesting.depth == 1:
            self._in_value = True
        elif nesting.in_string or char == '"':
            self._key += char
        if nesting.depth == 0:
            self._end_object(delta)

    def _push_value(self, char: str, delta: Delta) -> None:
        if not self._value:
            if char.isspace():
                return
            self._passes_on = self._key.strip('"') in ARGUMENTS and self._name is not None
            if self._passes_on and self._name is not None:
                self._index = self._next_index()
                delta.calls.append(CallDelta(self._index, self._name))
        self._value += char
        if self._passes_on and self._index is not None:
            delta.add(Delta(calls=[CallDelta(self._index, "", char)]))

    def _end_member(self) -> None:
        key = self._key.strip('"')
        try:
            value = json.loads(self._value)
        except ValueError:
            value = None
        if key == "name" and isinstance(value, str):
            self._name = value
        elif key in ARGUMENTS and not self._passes_on:
            self._arguments = json.dumps(value, ensure_ascii=False)
        self._key, self._value, self._in_value, self._passes_on = "", "", False, False

    def _end_object(self, delta: Delta) -> None:
        if self._index is None and self._name is not None:
            # The name came last, or there are no arguments.
            delta.calls.append(CallDelta(self._next_index(), self._name, self._arguments))
        elif self._index is None:
            delta.text += self._between + self._object
        self._between = ""
        self._begin_object()
