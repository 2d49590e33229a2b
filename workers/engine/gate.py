"""Turns that wait before the scheduler knows them: for grammars and stop patterns, for KV that is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from holdfast.errors import HoldfastError, InvalidRequest
from workers.engine.messages import Submission, TurnUpdate
from workers.grammar.stop_patterns import PARAM
from workers.scheduling import Finish

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting:
    submission: Submission
    deadline: float


class Gate:
    """Keeps submissions until what they wait for is done. For the step loop's thread."""

    def __init__(self, grammar_timeout_s: float, put: Callable[[Callable[[], None]], None]) -> None:
        self._timeout_s = grammar_timeout_s
        self._put = put
        self._waiting: dict[str, _Waiting] = {}

    @property
    def num_waiting(self) -> int:
        """The submissions that are kept."""
        return len(self._waiting)

    def wait(
        self,
        submission: Submission,
        ready: Future[T],
        then: Callable[[Submission, Future[T]], None],
        *,
        limited: bool = True,
    ) -> None:
        """Call ``then`` in the step loop when ``ready`` is done, unless the turn was removed by then.

        ``limited``: as a grammar, for ``grammar_timeout_s``.
        """
        deadline = time.monotonic() + self._timeout_s if limited else inf
        waiting = self._waiting[submission.turn_id] = _Waiting(submission, deadline)

        def done() -> None:
            if self._waiting.get(submission.turn_id) is waiting:
                del self._waiting[submission.turn_id]
                then(submission, ready)

        ready.add_done_callback(lambda _: self._put(done))

    def end_session(self, session_id: str, epoch: int, reason: Finish) -> dict[str, TurnUpdate]:
        """End a session's waiting turns, as ``end``, but those of a later owner.

        A later owner's epoch is remembered only once its turn is admitted: what is sent under an earlier one, as by a
        sweep that read the journal before, is not refused until then.
        """
        return self.end(lambda s: s.session_id == session_id and s.epoch <= epoch, reason)

    def end(self, which: Callable[[Submission], bool], reason: Finish | HoldfastError) -> dict[str, TurnUpdate]:
        """End the waiting turns for which ``which`` holds. Returns their last updates by turn id."""
        found = [turn_id for turn_id, waiting in self._waiting.items() if which(waiting.submission)]
        return {turn_id: self._ended(turn_id, reason) for turn_id in found}

    def end_overdue(self) -> dict[str, TurnUpdate]:
        """End the turns whose grammars take too long. Returns their last updates by turn id."""
        now, updates = time.monotonic(), {}
        for turn_id, waiting in [item for item in self._waiting.items() if item[1].deadline <= now]:
            grammar = waiting.submission.params.grammar
            param = grammar.param if grammar is not None else PARAM
            message = f"{param}: was not compiled within {self._timeout_s} s"
            updates[turn_id] = self._ended(turn_id, InvalidRequest(message, param))
        return updates

    def _ended(self, turn_id: str, reason: Finish | HoldfastError) -> TurnUpdate:
        del self._waiting[turn_id]
        if isinstance(reason, HoldfastError):
            return TurnUpdate(turn_id, error=reason)
        return TurnUpdate(turn_id, finish=reason)
