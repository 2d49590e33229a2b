"""The outputs of live turns, token by token: which tokens may come next, and when a turn ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

from workers.engine.stop_strings import StopStrings
from workers.grammar.matcher import Matcher
from workers.grammar.turns import TurnGrammars
from workers.scheduling import Finish, Turn


class Outputs:
    """Follows each live turn's grammar and stop strings. ``max_len``: of a whole sequence, in tokens."""

    def __init__(self, tokenizer: Path, eos_token_ids: Collection[int], max_len: int, grammars: TurnGrammars) -> None:
        self.grammars = grammars
        self._eos = frozenset(eos_token_ids)
        self._max_len = max_len
        self._stop_strings = StopStrings(tokenizer)

    def begin(self, turn: Turn, grammar: Matcher | None) -> Finish | None:
        """Follow a turn. Returns why it ended if a replay brings the whole output. Raises InvalidRequest."""
        if grammar is not None:
            self.grammars.begin(turn, grammar)
        return self._finish(turn) if turn.num_output else None

    def push(self, turn: Turn) -> Finish | None:
        """Why the turn's last token, a new one, ends it, if it does. Raises InvalidRequest: see ``TurnGrammars``."""
        self.grammars.push(turn)
        return self._finish(turn)

    def masks(self, turns: Sequence[Turn]) -> Future[dict[str, bytes]] | None:
        """See ``TurnGrammars.masks``."""
        return self.grammars.masks(turns)

    def forget(self, turn: Turn) -> None:
        """The turn has ended."""
        self._stop_strings.forget(turn)
        self.grammars.forget(turn)

    def _finish(self, turn: Turn) -> Finish | None:
        finish = turn.finish_by_token(turn.tokens[-1], self._eos, self._max_len)
        if finish is None and not self._eos and self.grammars.complete(turn):
            return Finish("stop")  # the model has no token that says so
        return finish or self._stop_strings.look(turn)
