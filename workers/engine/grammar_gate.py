"""Turns that wait for their grammars or stop patterns to be compiled, before the scheduler knows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
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


class GrammarGate:
    """Keeps submissions until their grammars are compiled, at most ``timeout_s``. For the step loop's thread."""

    def __init__(self, timeout_s: float, put: Callable[[Callable[[], None]], None]) -> None:
        self._timeout_s = timeout_s
        self._put = put
        self._waiting: dict[str, _Waiting] = {}

    def wait(self, submission: Submission, compiled: Future[T], then: Callable[[Submission, Future[T]], None]) -> None:
        """Call ``then`` in the step loop when ``compiled`` is done, unless the turn was removed by then."""
        self._waiting[submission.turn_id] = _Waiting(submission, time.monotonic() + self._timeout_s)

        def done() -> None:
            if self._waiting.pop(submission.turn_id, None) is not None:
                then(submission, compiled)

        compiled.add_done_callback(lambda _: self._put(done))

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
