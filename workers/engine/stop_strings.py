"""Stop strings, found in a turn's text also where they cross token boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from holdfast.detokenizer import Detokenizer
from workers.scheduling import Finish, Turn


@dataclass(slots=True)
class _StopText:
    """Searches one turn's output for its stop strings."""

    detokenizer: Detokenizer
    longest: int
    tail: str = ""

    def push(self, token: int, stops: tuple[str, ...], *, may_end: bool) -> str | None:
        piece = self.detokenizer.push(token)
        if not piece or not may_end:
            return None
        text = self.tail + piece
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        self.tail = text[-(self.longest - 1) :] if self.longest > 1 else ""
        return min(found)[1] if found else None


class StopStrings:
    """The stop strings of all live turns. The tokenizer is loaded when the first turn has any."""

    def __init__(self, tokenizer_path: Path) -> None:
        self._path = tokenizer_path
        self._tokenizer: Tokenizer | None = None
        self._texts: dict[str, _StopText] = {}

    def look(self, turn: Turn) -> Finish | None:
        """Whether the turn's last token completes one of its stop strings."""
        stops = turn.params.stop
        if not stops:
            return None
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self._path))
        state = self._texts.get(turn.turn_id)
        if state is None:
            # After a replay, search the earlier output too: a match may begin in it.
            state = _StopText(Detokenizer(self._tokenizer), max(map(len, stops)))
            self._texts[turn.turn_id] = state
            fresh = turn.tokens[turn.prompt_len :]
        else:
            fresh = turn.tokens[-1:]
        matched, first = None, turn.num_output - len(fresh) + 1
        for number, token in enumerate(fresh, first):
            # The first min_tokens are never part of a match, so that a router can show them at once.
            matched = state.push(token, stops, may_end=number > turn.params.min_tokens)
        return Finish("stop", matched) if matched is not None else None

    def forget(self, turn: Turn) -> None:
        """The turn has ended."""
        self._texts.pop(turn.turn_id, None)
