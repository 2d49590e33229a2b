"""Reasoning between two markers, before or amid the answer."""

from __future__ import annotations

from router.formats.deltas import Delta, Parser, held_back


class TaggedReasoning:
    """Text between ``begin`` and ``end`` is reasoning, the rest goes to the parser of the answer.

    ``inside``: the prompt has opened the reasoning already.
    """

    def __init__(self, begin: str, end: str, answer: Parser, *, inside: bool = False) -> None:
        self._begin, self._end, self._answer = begin, end, answer
        self._inside = inside
        self._held = ""
        self._skips_space = inside

    def push(self, text: str) -> Delta:
        delta, self._held = Delta(), self._held + text
        while self._held:
            marker = self._end if self._inside else self._begin
            at = self._held.find(marker)
            stop = at if at >= 0 else len(self._held) - held_back(self._held, marker)
            self._show(self._held[:stop], delta)
            self._held = self._held[stop:]
            if at < 0:
                break
            self._held = self._held[len(marker) :]
            self._inside = not self._inside
            self._skips_space = True
        return delta

    def finish(self) -> Delta:
        delta, held = Delta(), self._held
        self._held = ""
        self._show(held, delta)
        delta.add(self._answer.finish())
        return delta

    def _show(self, text: str, delta: Delta) -> None:
        if self._skips_space:
            text = text.lstrip()  # templates put line breaks after the markers
            self._skips_space = not text
        if not text:
            return
        if self._inside:
            delta.reasoning += text
        else:
            delta.add(self._answer.push(text))
