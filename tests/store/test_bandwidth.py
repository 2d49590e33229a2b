"""How fast KV comes, where several sessions' comes at once."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import workers.serving.bandwidth
from workers.serving.bandwidth import Bandwidth, SharedTime


class Clock:
    """In the place of the ``time`` module."""

    def __init__(self) -> None:
        self.s = 100.0

    def monotonic(self) -> float:
        return self.s


@pytest.mark.parametrize("at_once", [1, 4, 64])
def test_a_link_is_as_fast_for_many_as_for_one(at_once: int) -> None:
    clock, bandwidth = Clock(), Bandwidth(cast(Any, SimpleNamespace()))
    with mock.patch.object(workers.serving.bandwidth, "time", clock), ExitStack() as transfers:
        charged = [transfers.enter_context(bandwidth.time.transfer()) for _ in range(at_once)]
        clock.s += at_once * 0.1  # each has its share of the link
        for charged_s in charged:
            bandwidth.measured(1000, charged_s())
    assert bandwidth.seconds(1000) == pytest.approx(0.1)


@given(st.lists(st.tuples(st.sampled_from(("begin", "end")), st.floats(0.0, 10.0)), max_size=30))
def test_all_are_charged_together_what_has_passed(steps: list[tuple[str, float]]) -> None:
    clock, time = Clock(), SharedTime()
    under_way, busy_s, charged = list[Any](), 0.0, 0.0
    with mock.patch.object(workers.serving.bandwidth, "time", clock):
        for what, seconds in [*steps, *[("end", 1.0)] * len(steps)]:
            clock.s += seconds
            busy_s += seconds if under_way else 0.0
            if what == "begin":
                transfer = time.transfer()
                under_way.append((transfer, transfer.__enter__()))
            elif under_way:
                transfer, charged_s = under_way.pop(0)
                charged += charged_s()
                transfer.__exit__(None, None, None)
    assert charged == pytest.approx(busy_s)
