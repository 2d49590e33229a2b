"""The scheduler alone, with a simulated device: every turn ends, and no page leaks."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.errors import PromptTooLong, QueueFull, SessionBusy
from workers.kv import OWN_SCOPE, KVScope, Outcome, SessionCache, full_group, window_group
from workers.kv.slot import new_tokens
from workers.scheduling import SamplingParams, Scheduler, SchedulerLimits, Step, Turn

ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 5),  # session
        st.integers(1, 40),  # input tokens
        st.integers(1, 12),  # output tokens
        st.integers(0, 6),  # steps until the next arrival
        st.booleans(),  # aborted on the way
        st.booleans(),  # in the background
    ),
    max_size=20,
)


class Played:
    """Runs steps: copies are done, sampled tokens are made up from what was computed.

    With ``overlap``, a step's tokens are known when the next one is planned. ``end_tokens`` end a turn.
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        step_tokens: int,
        windows: tuple[int, ...] = (),
        *,
        overlap: bool = False,
        end_tokens: Collection[int] = (),
    ) -> None:
        self.overlap, self.end_tokens = overlap, frozenset(end_tokens)
        self.in_flight = Step()
        groups = [full_group(num_pages), *(window_group(max(4, num_pages // 2), window) for window in windows)]
        self.cache = SessionCache(groups, page_size, max_slots=8)
        limits = SchedulerLimits(context_len=64, step_tokens=step_tokens, max_running=4, max_waiting=6)
        self.scheduler = Scheduler(self.cache, limits)
        self.waited: dict[str, int] = {}

    def turn(
        self,
        turn_id: str,
        session_id: str,
        tokens: list[int],
        params: SamplingParams,
        tenant: str = "",
        scope: KVScope = OWN_SCOPE,
    ) -> Turn:
        given = {"end_tokens": self.end_tokens, "max_len": self.scheduler.max_len_of(scope)}
        return Turn(turn_id, session_id, tenant, new_tokens(tokens), len(tokens), 0, params, scope, **given)

    def step(self) -> Step:
        step = self.scheduler.plan()
        assert sum(w.count for w in step.work) <= max(self.scheduler.limits.step_tokens, len(self.scheduler.running))
        self.cache.finish_copies(len(step.copies))
        for work in step.work:
            slot = self.cache.slots[work.turn.session_id]
            assert work.start == slot.committed_len and work.start + work.count <= slot.allocated_len
        if self.overlap:
            self.collect(self.in_flight)
        self.scheduler.commit(step)
        self.in_flight = step
        if not self.overlap:
            self.collect(step)
        report = self.cache.audit()
        assert report.ok, report
        self.check_background()
        return step

    def collect(self, step: Step) -> None:
        for work in step.work:
            turn = work.turn
            if work.samples and not turn.ended:
                assert turn.in_flight, "each token is received once"
                turn.receive([sum(turn.tokens) % 5])
                if turn.finish_by_token():
                    self.scheduler.finish(turn, Outcome.COMPLETED)

    def check_background(self) -> None:
        """No turn waits for pages that a background turn holds."""
        waits = any(not turn.params.background for turn in self.scheduler.waiting)
        if waits and self.scheduler._head_is_blocked:
            assert not any(turn.params.background for turn in self.scheduler.running.values())

    def run(self, turn: Turn) -> None:
        """Until it ended."""
        self.scheduler.submit(turn)
        while not turn.ended:
            self.step()


@settings(max_examples=150, deadline=None)
@example(
    arrivals=[(0, 39, 12, 0, False, False)],
    page_size=1,
    tokens=48,
    step_tokens=4,
    windows=(),
    overlap=True,
    end_tokens=set(),
    shares=(0, 0, 0),
)  # ends where the pool does
@given(
    arrivals=ARRIVALS,
    page_size=st.sampled_from([1, 4, 16]),
    tokens=st.integers(48, 160),
    step_tokens=st.integers(4, 40),
    windows=st.sampled_from([(), (3,), (30,), (2, 17)]),
    overlap=st.booleans(),
    end_tokens=st.sampled_from([(), (4,)]),
    shares=st.sampled_from([(0, 0, 0), (300_000, 0, 0), (200_000, 500_000, 0), (300_000, 300_000, 900_000)]),
)
def test_every_turn_ends_and_no_page_is_lost(
    arrivals: list,
    page_size: int,
    tokens: int,
    step_tokens: int,
    windows: tuple[int, ...],
    overlap: bool,
    end_tokens: Collection[int],
    shares: tuple[int, ...],
) -> None:
    num_pages = -(-tokens // page_size) + 1
    played = Played(page_size, num_pages, step_tokens, windows, overlap=overlap, end_tokens=end_tokens)
    scheduler, ended = played.scheduler, 0
    for number, (session, size, output, pause, aborted, background) in enumerate(arrivals):
        params = SamplingParams(max_tokens=output, background=background)
        scope = KVScope(f"scope {session % 3}", shares[session % 3])
        turn = played.turn(f"t{number}", f"s{session}", [session] * size, params, scope=scope)
        try:
            scheduler.submit(turn)
        except (SessionBusy, QueueFull, PromptTooLong):
            continue
        ended += 1
        for _ in range(pause):
            played.step()
        if aborted:
            scheduler.finish(turn, Outcome.ABORTED)
            scheduler.finish(turn, Outcome.ABORTED)
    for _ in range(4000):
        if not scheduler.turns:
            break
        in_flight = played.in_flight.work if played.overlap else []
        step = played.step()
        assert step.work or in_flight, "turns are there, yet nothing runs"
    assert not scheduler.turns and not scheduler.waiting and not scheduler.running
    for session_id in list(played.cache.slots):
        played.cache.release_session(session_id)
    played.cache.flush()
    assert played.cache.num_free() == [group.pool.num_pages for group in played.cache.groups]


def test_refused_turns_leave_nothing() -> None:
    played = Played(4, 16, 8)
    state = list(played.cache.groups[0].pool.refcounts)
    for size in (64, 100):
        try:
            played.scheduler.submit(played.turn("t", "s", [1] * size, SamplingParams()))
        except PromptTooLong as error:
            assert "maximum allowed length" in error.message
        else:
            raise AssertionError("it was accepted")
    assert state == played.cache.groups[0].pool.refcounts and not played.cache.slots


def test_many_turns_of_one_tenant_do_not_hold_up_another() -> None:
    played = Played(4, 64, 16)
    for number in range(6):
        played.scheduler.submit(played.turn(f"a{number}", f"a{number}", [1] * 4, SamplingParams(max_tokens=8), "a"))
        if number < 4:
            played.step()
    assert len(played.scheduler.running) == 4, "the batch is full of them"
    played.scheduler.finish(played.scheduler.turns["a5"], Outcome.ABORTED)
    played.scheduler.submit(played.turn("b", "b", [1] * 4, SamplingParams(max_tokens=8), "b"))
    while "b" not in played.scheduler.running:
        played.step()
    assert "a4" in {turn.turn_id for turn in played.scheduler.waiting}, "the newcomer of the other tenant came first"


def submitted(played: Played, turn_id: str, num_tokens: int = 4, *, background: bool = False, output: int = 8) -> Turn:
    params = SamplingParams(max_tokens=output, background=background)
    turn = played.turn(turn_id, turn_id, [1] * num_tokens, params)
    played.scheduler.submit(turn)
    return turn


def test_a_background_turn_gives_up_its_place_and_its_pages() -> None:
    played = Played(4, 18, 40)
    running = played.scheduler.running
    for number in range(4):
        submitted(played, f"b{number}", background=True)
        played.step()
    assert list(running) == ["b0", "b1", "b2", "b3"]
    submitted(played, "first")
    played.step()
    assert set(running) == {"b0", "b1", "b2", "first"}, "the batch was full, and the youngest left"
    submitted(played, "long", 60, output=2)
    played.step()
    assert set(running) == {"first", "long"}, "the pool was full"
    while played.scheduler.turns:
        played.step()
    assert played.scheduler.num_retracted >= 4


def test_background_turns_are_admitted_last_and_may_fill_half_of_the_queue() -> None:
    played = Played(4, 64, 8)
    for number in range(3):
        submitted(played, f"b{number}", background=True)
    with pytest.raises(QueueFull):
        submitted(played, "b3", background=True)
    for number in range(3):
        submitted(played, f"t{number}")
    played.step()
    assert {"t0", "t1"} <= set(played.scheduler.running) and not {"b0", "b1"} & set(played.scheduler.running)


def test_the_prefill_of_a_background_turn_takes_what_others_leave() -> None:
    played = Played(4, 64, 8)
    submitted(played, "b", 40, background=True)
    played.step()
    submitted(played, "t", 40)
    played.step()
    step = played.step()
    assert {work.turn.turn_id: work.count for work in step.work} == {"t": 8}


def test_a_paused_scheduler_computes_nothing_and_keeps_its_turns() -> None:
    played = Played(4, 64, 40)
    turns = [submitted(played, f"t{number}") for number in range(2)]
    played.step()
    played.scheduler.paused = True
    assert not played.step().work and not played.scheduler.has_work and len(played.scheduler.running) == 2
    (computed,) = {slot.committed_len for slot in played.cache.slots.values()}
    played.scheduler.retract_all()
    assert list(played.scheduler.waiting) == turns and not played.scheduler.running
    played.cache.flush()
    assert played.cache.num_free() == [64], "what they computed may be dropped"
    played.scheduler.paused = False
    while played.scheduler.turns:
        played.step()
    assert [turn.num_output for turn in turns] == [8, 8]
    assert played.scheduler.num_recomputed == 2 * computed


HALF = KVScope("half", 500_000)


def test_a_scope_beyond_its_share_evicts_nobody_and_blocks_nobody() -> None:
    played = Played(page_size=4, num_pages=16, step_tokens=40)
    scheduler, one = played.scheduler, SamplingParams(max_tokens=1)
    played.run(played.turn("0", "b", [2] * 28, one, "b"))
    # Of 16 pages, b's idle session has 7. Both of the scope's turns fit, into what is free and their own.
    for number in range(4):
        played.run(played.turn(f"a{number}", f"a{number}", [10 + number] * 20, one, "a", HALF))
        assert played.cache.slots["b"].committed_len == 28, (
            "an idle session is not evicted for a scope beyond its share"
        )
    long = SamplingParams(max_tokens=30)
    turns = [played.turn(f"x{number}", f"x{number}", [20 + number] * 20, long, "a", HALF) for number in range(3)]
    for turn in turns:
        scheduler.submit(turn)
    played.step()
    assert len(scheduler.running) == 1 and scheduler._blocked_scopes == {"half"} and not scheduler._head_is_blocked
    later = played.turn("later", "c", [3] * 4, one, "c")
    played.run(later)
    assert not turns[0].ended and played.cache.slots["b"].committed_len == 28, "c takes what the scope has too much"
    for _ in range(200):
        played.step()
    assert all(turn.ended for turn in turns)


def test_what_a_scope_has_beyond_its_share_is_evicted_before_older_sessions() -> None:
    played = Played(page_size=4, num_pages=16, step_tokens=40)
    one, small = SamplingParams(max_tokens=1), KVScope("small", 250_000)
    played.run(played.turn("0", "b", [2] * 24, one, "b", HALF))
    for number in range(4):
        played.run(played.turn(f"a{number}", f"a{number}", [10 + number] * 8, one, "a", small))
    played.run(played.turn("1", "c", [3] * 20, one, "c"))
    assert played.cache.slots["b"].committed_len == 24 and "a0" not in played.cache.slots


def test_running_turns_beyond_a_share_yield_to_turns_within_one() -> None:
    played = Played(page_size=4, num_pages=16, step_tokens=40)
    scheduler, long = played.scheduler, SamplingParams(max_tokens=8)
    greedy = [played.turn(f"g{n}", f"g{n}", [n] * 18, long, "a", HALF) for n in range(3)]
    for turn in greedy:
        scheduler.submit(turn)
    played.step()
    assert len(scheduler.running) == 3, "while nobody else needs the pages"
    modest = played.turn("m", "m", [9] * 20, SamplingParams(max_tokens=1), "b", HALF._replace(name="other half"))
    played.run(modest)
    assert scheduler.num_retracted and greedy[0].turn_id in scheduler.running
    for _ in range(50):
        played.step()
    assert all(turn.ended for turn in greedy)


def test_a_prompt_longer_than_a_share_is_refused() -> None:
    played = Played(page_size=4, num_pages=16, step_tokens=40)
    with pytest.raises(PromptTooLong, match=r"27 tokens that your share of a worker's KV has room for"):
        played.scheduler.submit(played.turn("t", "s", [1] * 28, SamplingParams(), "a", HALF))
