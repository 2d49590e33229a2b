"""Turns that wait for their grammars to be compiled, before the scheduler knows them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from holdfast.errors import InvalidRequest
from workers.engine.messages import Submission

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

    def too_late(self, submission: Submission) -> InvalidRequest:
        """The error of a submission whose grammar took too long."""
        grammar = submission.params.grammar
        param = grammar.param if grammar is not None else None
        return InvalidRequest(f"{param}: the grammar was not compiled within {self._timeout_s} s", param)

    def remove(self, which: Callable[[Submission], bool]) -> list[Submission]:
        """Remove the waiting submissions for which ``which`` holds."""
        found = [waiting.submission for waiting in self._waiting.values() if which(waiting.submission)]
        for submission in found:
            del self._waiting[submission.turn_id]
        return found

    def remove_overdue(self) -> list[Submission]:
        """Remove the submissions whose grammars took too long."""
        now = time.monotonic()
        overdue = {turn_id for turn_id, waiting in self._waiting.items() if waiting.deadline <= now}
        return self.remove(lambda submission: submission.turn_id in overdue) if overdue else []
