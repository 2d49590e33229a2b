"""A step is planned while the device computes the one before: the same tokens, and nothing past an end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from holdfast.tokens import pack_tokens
from tests.workers.engine import NO_EOS, SMALL, Engine
from tests.workers.groups import GroupEngine
from workers.engine.choice import PendingChoice, StepResult
from workers.kv.slot import new_tokens
from workers.scheduling import Finish, Grammar, SamplingParams, Work

TIGHT = {"max_total_tokens": 100, "chunked_prefill_size": 24, "page_size": 4}
KINDS = [
    SamplingParams(max_tokens=14, ignore_eos=True),
    SamplingParams(max_tokens=14, temperature=0.9, top_k=50, seed=5, num_logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=14, temperature=1.0, seed=3, frequency_penalty=1.5, repetition_penalty=1.2),
    SamplingParams(max_tokens=14, min_tokens=6, temperature=1.0, seed=9, stop=("e", "the")),
    SamplingParams(max_tokens=14, grammar=Grammar("regex", "(yes|no){3}", "regex")),
    SamplingParams(max_tokens=1, num_logprobs=1, logprob_start=2),
    SamplingParams(max_tokens=0, num_logprobs=1, logprob_start=0),
]


def prompt(seed: int, length: int) -> list[int]:
    return [5 + (seed * 131 + i * 17) % 2000 for i in range(length)]


def outcome(engine: Engine, turn_id: str) -> tuple[Any, ...]:
    """All that a client sees of a turn."""
    updates = engine.updates[turn_id]
    logprobs = [lp.logprob for u in updates for lp in (*u.input_logprobs, *u.logprobs)]
    assert all(update.finish is None for update in updates[:-1])
    return engine.output(turn_id), updates[-1].finish, logprobs


def play(engine: Engine) -> dict[str, list[int]]:
    """Turns of all kinds at once, and a second turn of each session: what the first left behind is right."""
    for i in range(2 * len(KINDS)):
        engine.submit(f"t{i}", f"s{i}", prompt(i, 9 + 3 * i), KINDS[i % len(KINDS)])
        engine.leader.step()
    engine.run()
    for i in range(len(KINDS)):
        known = list(engine.cache.slots[f"s{i}"].tokens) if f"s{i}" in engine.cache.slots else prompt(i, 9 + 3 * i)
        engine.submit(f"u{i}", f"s{i}", [*known, 77 + i], KINDS[0])
        engine.run()
    return {turn_id: engine.output(turn_id) for turn_id in engine.updates}


@pytest.mark.parametrize("size", [1, 2])
def test_turns_of_all_kinds_say_the_same_with_and_without_overlap(size: int) -> None:
    engines = [
        Engine(SMALL, overlap_schedule=False, **TIGHT),
        Engine(SMALL, **TIGHT) if size == 1 else GroupEngine(size, SMALL, **TIGHT),
    ]
    for engine in engines:
        play(engine)
    plain, overlapped = engines
    assert not plain.leader.rank.overlaps and overlapped.leader.rank.overlaps
    assert overlapped.scheduler.num_retracted > 0, "pages ran out"
    assert set(plain.updates) == set(overlapped.updates)
    for i in range(2 * len(KINDS)):
        scored = [lp for update in overlapped.updates[f"t{i}"] for lp in update.input_logprobs]
        start = KINDS[i % len(KINDS)].logprob_start
        assert len(scored) == (8 + 3 * i - start if start >= 0 else 0), "each input token is scored once"
    for turn_id in plain.updates:
        *said, logprobs = outcome(plain, turn_id)
        # Two ranks sum in another order than one.
        assert (*said, pytest.approx(logprobs, abs=1e-4)) == outcome(overlapped, turn_id), turn_id
    if isinstance(overlapped, GroupEngine):
        assert not overlapped.refused
        overlapped.stop()


class Held:
    """Lets the device go on only when it is told: until then, what it chose is not known."""

    def __init__(self, engine: Engine) -> None:
        self.waiting: list[tuple[Future[StepResult], PendingChoice]] = []
        self._choose = engine.leader.rank.choose
        engine.leader.rank.choose = self.choose  # type: ignore[method-assign]

    def choose(self, work: Sequence[Work], masks: Any = None) -> Future[StepResult]:
        held: Future[StepResult] = Future()
        self.waiting.append((held, self._choose(work, masks)))
        return held

    def go(self) -> None:
        """The oldest step's results arrive."""
        held, real = self.waiting.pop(0)
        held.set_result(real.result())


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_known() -> None:
    engine = Engine()
    held, launched = Held(engine), []
    launch = engine.leader.rank.launch

    def launching(batch: Any, *rest: Any) -> None:
        launched.append(list(batch.tokens))
        launch(batch, *rest)
        if len(held.waiting) > 0:
            held.go()

    engine.leader.rank.launch = launching  # type: ignore[method-assign]
    engine.submit("a", "a", prompt(1, 5))
    engine.submit("b", "b", prompt(2, 6))
    engine.leader.step()
    assert len(held.waiting) == 1, "nothing waited for the first step"
    engine.leader.step()
    assert launched[1] == [-1, -2], "the tokens come from the device"
    assert [len(engine.output(turn)) for turn in "ab"] == [1, 1]


def stopped(engine: Engine, at: int) -> tuple[list[int], int]:
    """A turn whose ``at``-th token of an unrestricted output ends it. Its output, and the length of its input."""
    free = engine.generate("free", prompt(4, 13), NO_EOS)
    given = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=frozenset({free[at]}))
    output = engine.generate("s", prompt(4, 13), given)
    assert output == free[: free.index(free[at]) + 1]
    return output, 13


@pytest.mark.parametrize("at", range(1, 8))
def test_a_turn_found_finished_a_step_late_leaves_no_tail(at: int) -> None:
    """Whatever the place in a page: 13 tokens and 1 to 8 more, of pages of 4."""
    engine = Engine(SMALL, page_size=4)
    output, prompt_len = stopped(engine, at)
    slot = engine.cache.slots["s"]
    assert slot.committed_len == slot.allocated_len == prompt_len + len(output) - 1
    assert list(slot.tokens) == prompt(4, 13) + output
    assert len(slot.tables[0].pages) == -(-slot.committed_len // 4)
    assert engine.last("turn-1").finish == Finish("stop", output[-1])
    engine.leader.step()
    assert engine.cache.audit().ok and engine.leader._in_flight is None
    # The next turn computes its own token, and the one that ended the last turn.
    again = Engine(SMALL, page_size=4, overlap_schedule=False)
    history = [*prompt(4, 13), *output, 99]
    assert engine.generate("s", history) == again.generate("s", history)


def test_what_ends_a_turn_in_flight_shows_nothing_more() -> None:
    ends: list[Callable[[Engine], object]] = [
        lambda engine: engine.leader.abort("t"),
        lambda engine: engine.leader.release_session("s", 1),
        lambda engine: engine.submit("t", "s", prompt(1, 10), epoch=2),  # by a later owner, under the same id
        lambda engine: engine.leader.end_all(Finish("abort", "the worker stops")),
    ]
    for end in ends:
        engine = Engine()
        expected = engine.generate("expected", prompt(1, 10))
        engine.submit("t", "s", prompt(1, 10))
        for _ in range(4):
            engine.leader.step()
        assert engine.scheduler.turns["t"].in_flight
        end(engine)
        engine.commands()
        engine.leader.step()
        engine.run()
        engine.leader.step()
        assert engine.cache.audit().ok
        updates = engine.updates["t"]
        last = next(i for i, update in enumerate(updates) if update.finish is not None)
        outputs = [[t for update in part for t in update.tokens] for part in (updates[: last + 1], updates[last + 1 :])]
        assert outputs[0] == expected[:3]
        assert outputs[1] in ([], expected), "of its successor, whole"
        engine.submit("next", "s", prompt(1, 10), epoch=3)
        engine.run()
        assert engine.output("next") == expected


def test_a_retracted_turn_takes_its_token_when_it_arrives() -> None:
    engine = Engine()
    expected = engine.generate("expected", prompt(1, 10))
    engine.submit("t", "s", prompt(1, 10))
    for _ in range(3):
        engine.leader.step()
    engine.scheduler.retract_all()
    turn = engine.scheduler.turns["t"]
    assert turn.in_flight and list(engine.scheduler.waiting) == [turn]
    engine.leader.step()
    assert not turn.in_flight and turn.num_output == 3
    engine.run()
    assert engine.output("t") == expected


def test_a_paused_engine_collects_what_is_in_flight() -> None:
    engine = Engine()
    engine.submit("t", "s", prompt(1, 10))
    for _ in range(3):
        engine.leader.step()
    engine.scheduler.paused = True
    engine.leader.step()
    assert engine.leader._in_flight is None and len(engine.output("t")) == 3
    engine.leader.step()
    assert len(engine.output("t")) == 3
    engine.scheduler.paused = False
    engine.run()
    assert len(engine.output("t")) == 12


def test_an_error_of_the_device_ends_the_loop() -> None:
    engine = Engine()

    def fail(*_: Any) -> None:
        raise ArithmeticError("an illegal memory access")

    engine.submit("t", "s", prompt(1, 10))
    engine.leader.step()
    engine.leader.rank.stream.run(lambda: None).result(10)
    engine.leader.rank._forward = fail  # type: ignore[method-assign]
    engine.leader.step()  # launched, and not known to have failed
    with pytest.raises(ArithmeticError, match="illegal"):
        engine.leader.step()
    with pytest.raises(ArithmeticError, match="illegal"):
        engine.leader.rank.stream.run(lambda: None).result(10)


def test_followers_compute_the_tokens_that_the_leader_chose() -> None:
    group = GroupEngine(2)
    batches = []
    send = group.leader._replication.send
    assert send is not None

    def sending(entry: Any) -> None:
        batches.append(entry.batch)
        send(entry)

    group.leader._replication.send = sending
    output = group.generate("s", prompt(3, 10))
    assert batches[1].tokens == pack_tokens(new_tokens([-1])), "the log is ahead of what it speaks of"
    assert output == Engine(overlap_schedule=False).generate("s", prompt(3, 10))
    assert not group.refused
    group.stop()
