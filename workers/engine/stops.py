"""Stop strings and patterns, found in a turn's text also where they cross token boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from holdfast.detokenizer import Detokenizer
from workers.grammar.stop_patterns import StopPatterns
from workers.scheduling import Finish, Turn


@dataclass(slots=True)
class _StopText:
    """Searches one turn's output."""

    detokenizer: Detokenizer
    stops: tuple[str, ...]
    patterns: StopPatterns | None
    tail: str = ""

    def push(self, token: int, *, may_end: bool) -> str | None:
        """The stop string, or the pattern, that the token completes. Raises InvalidRequest: see ``StopPatterns``."""
        piece = self.detokenizer.push(token)
        if not piece or not may_end:
            return None
        text = self.tail + piece
        found = [(text.find(stop), stop) for stop in self.stops if stop in text]
        longest = max(map(len, self.stops), default=0)
        self.tail = text[-(longest - 1) :] if longest > 1 else ""
        if found:
            return min(found)[1]
        return self.patterns.push(piece) if self.patterns is not None else None


class Stops:
    """What ends the outputs of all live turns. The tokenizer is loaded when the first turn has such a stop."""

    def __init__(self, tokenizer_path: Path) -> None:
        self._path = tokenizer_path
        self._texts: dict[str, _StopText] = {}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._path))

    def begin(self, turn: Turn, patterns: StopPatterns | None) -> None:
        """Follow a turn."""
        if turn.params.stop or patterns is not None:
            own = patterns.deep_copy() if patterns is not None else None
            self._texts[turn.turn_id] = _StopText(Detokenizer(self._tokenizer), turn.params.stop, own)

    def look(self, turn: Turn, num_new: int) -> Finish | None:
        """Whether one of the turn's last ``num_new`` tokens, which are new, completes a stop. Raises InvalidRequest."""
        text = self._texts.get(turn.turn_id)
        if text is None:
            return None
        matched, first = None, turn.num_output - num_new + 1
        for number, token in enumerate(turn.tokens[len(turn.tokens) - num_new :], first):
            # The first min_tokens are never part of a match, so that a router can show them at once.
            matched = text.push(token, may_end=number > turn.params.min_tokens)
        return Finish("stop", matched) if matched is not None else None

    def forget(self, turn: Turn) -> None:
        """The turn has ended."""
        self._texts.pop(turn.turn_id, None)
