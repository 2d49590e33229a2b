"""The states of a live turn: only the transitions of a turn's life are legal."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.v1 import session_pb2
from router.turns.turn import LiveTurn, TurnRequest, TurnState


def live_turn() -> LiveTurn:
    async def prepare(session: object) -> tuple[int, array[int]]:
        raise AssertionError("not called")

    request = TurnRequest("tenant", prepare, session_pb2.Sampling(), "s", turn_id="t")
    return LiveTurn(request, None, 0, array("i", [1, 2]), 2)


def link(calls: list[tuple[str, str]]) -> Any:
    return SimpleNamespace(
        abort=lambda submission: calls.append(("abort", submission)),
        interrupt=lambda submission: calls.append(("interrupt", submission)),
    )


def test_a_turn_s_life_with_a_failover() -> None:
    calls: list[tuple[str, str]] = []
    turn = live_turn()
    turn.placed(link(calls))
    first = turn.new_submission()
    assert first != turn.new_submission(), "each submission has its own id"
    turn.unplaced()
    assert turn.link is None and turn.state is TurnState.UNPLACED
    turn.placed(link(calls))
    last = turn.new_submission()
    turn.ended()
    assert calls == [("abort", last)], "the worker hears of the end"


def test_an_abort_reaches_the_worker_if_there_is_one() -> None:
    calls: list[tuple[str, str]] = []
    turn = live_turn()
    turn.abort()
    assert turn.abort_requested and not calls
    turn.placed(link(calls))
    submission = turn.new_submission()
    turn.abort()
    assert calls == [("interrupt", submission)]


def test_illegal_transitions_are_refused() -> None:
    turn = live_turn()
    with pytest.raises(AssertionError, match="unplaced cannot become running"):
        turn.new_submission()
    with pytest.raises(AssertionError, match="unplaced"):
        _ = turn.worker
    turn.placed(link([]))
    with pytest.raises(AssertionError, match="placed cannot become unplaced"):
        turn.unplaced()
    turn.new_submission()
    with pytest.raises(AssertionError, match="running"):
        turn.reprepared(live_turn())
    turn.ended()
    with pytest.raises(AssertionError, match="ended cannot become placed"):
        turn.placed(link([]))
    with pytest.raises(AssertionError, match="ended cannot become ended"):
        turn.ended()
