"""The outputs of live turns, token by token: which tokens may come next, and when a turn ends."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

from workers.engine.stops import Stops
from workers.grammar.matcher import Matcher
from workers.grammar.stop_patterns import StopPatterns
from workers.grammar.turns import Masks, TurnGrammars
from workers.scheduling import Finish, SamplingParams, Turn, Work


class Outputs:
    """Follows each live turn's grammar and stops."""

    def __init__(self, tokenizer: Path, eos_token_ids: Collection[int], grammars: TurnGrammars) -> None:
        self.grammars = grammars
        self.eos = frozenset(eos_token_ids)
        self._stops = Stops(tokenizer)
        self._followed: set[str] = set()
        """Turns with a grammar, stop strings or patterns: tokens of the others are looked at alone."""

    def compile(self, params: SamplingParams) -> Future[Matcher] | Future[StopPatterns] | None:
        """What ``begin`` needs of a turn with a grammar, or with stop patterns. The future may raise InvalidRequest."""
        if params.grammar is not None:
            return self.grammars.compile(params.grammar)
        return self.grammars.compile_stops(params.stop_regexes) if params.stop_regexes else None

    def begin(self, turn: Turn, compiled: Matcher | StopPatterns | None) -> Finish | None:
        """Follow a turn. Returns why it ended if a replay brings the whole output. Raises InvalidRequest."""
        patterns = compiled if isinstance(compiled, StopPatterns) else None
        if compiled is not None and not isinstance(compiled, StopPatterns):
            self.grammars.begin(turn, compiled)
        self._stops.begin(turn, patterns)
        if turn.params.stop or compiled is not None:
            self._followed.add(turn.turn_id)
        return self._finish(turn, turn.num_output) if turn.num_output else None

    def receive(self, turn: Turn, tokens: Sequence[int]) -> Finish | None:
        """Append new tokens to a turn, up to the first that ends it. Returns why it ends, if it does.

        Raises InvalidRequest if its grammar or a pattern becomes too complex to follow after one of them.
        """
        if turn.turn_id not in self._followed:
            turn.receive(tokens)
            return turn.finish_by_token()
        for token in tokens:
            turn.receive((token,))
            self.grammars.push(turn)
            if (finish := self._finish(turn, 1)) is not None:
                return finish
        return None

    def masks(self, work: Sequence[Work]) -> Future[Masks] | None:
        """See ``TurnGrammars.masks``."""
        return self.grammars.masks(work)

    def forget(self, turn: Turn) -> None:
        """The turn has ended."""
        self._followed.discard(turn.turn_id)
        self._stops.forget(turn)
        self.grammars.forget(turn)

    def _finish(self, turn: Turn, num_new: int) -> Finish | None:
        finish = turn.finish_by_token()
        if finish is None and not self.eos and self.grammars.complete(turn):
            return Finish("stop")  # the model has no token that says so
        return finish or self._stops.look(turn, num_new)
