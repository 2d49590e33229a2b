"""What parsers make of an output's text, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class CallDelta:
    """A piece of a tool call. The first piece of a call has its ``name``."""

    index: int
    name: str = ""
    arguments: str = ""
    """JSON text."""


@dataclass(slots=True)
class Delta:
    """New output: the parts of an answer that it adds to."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, other: Delta) -> None:
        """Append a later delta."""
        self.text += other.text
        self.reasoning += other.reasoning
        for call in other.calls:
            if self.calls and self.calls[-1].index == call.index:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)


class Parser(Protocol):
    """Reads an output from its start to its end."""

    def push(self, text: str) -> Delta:
        """What this text completes; a piece that may be the start of a marker is held back."""

    def finish(self) -> Delta:
        """The output has ended: what was held back."""


class PlainText:
    """Neither reasoning nor calls."""

    def push(self, text: str) -> Delta:
        return Delta(text)

    def finish(self) -> Delta:
        return Delta()


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of ``text`` may be the start of ``marker``."""
    most = min(len(marker) - 1, len(text))
    return next((n for n in range(most, 0, -1) if marker.startswith(text[len(text) - n :])), 0)
