"""Drafts change when tokens come, never which: law L14, and no page is held for a guess longer than its step."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from tests.workers.engine import SMALL, Engine, eager
from tests.workers.groups import GroupEngine
from tests.workers.test_overlap import outcome, play, prompt
from workers.kv.slot import new_tokens
from workers.scheduling import Draft, Finish, SamplingParams, Turn

LONG = SamplingParams(max_tokens=24, ignore_eos=True)
TIGHT = {"max_total_tokens": 72, "chunked_prefill_size": 24, "page_size": 4}
TWO_WORDS = ((50, 40.0), (51, 40.0))
"""With such a bias, an output repeats itself by chance."""


class Guesses:
    """In place of a lookup: knows what turns would say, and is wrong from a random token on."""

    def __init__(self, engine: Engine, outputs: dict[str, list[int]], seed: int = 0) -> None:
        self.outputs, self.rng, self.num_accepted = outputs, random.Random(seed), 0
        speculation = engine.leader.drafts.speculation
        assert speculation is not None
        speculation.propose = self.propose  # type: ignore[method-assign]
        speculation.candidates = lambda num_rows: list(engine.scheduler.running.values())  # type: ignore[method-assign]
        speculation.pays = self.pays  # type: ignore[method-assign]

    def propose(self, turn: Turn, limit: int, num_rows: int) -> Draft | None:
        num_right, num_wrong = self.rng.choice([(0, 0), (0, 1), (0, 5), (1, 0), (1, 2), (3, 0), (3, 3), (8, 0)])
        draft = self.outputs[turn.turn_id][turn.num_output :][:num_right]
        draft += [self.rng.randrange(5, 2000) for _ in range(num_wrong)]
        return Draft(array("i", draft[:limit])) if draft[:limit] else None

    def pays(self, num_rows: int) -> bool:
        return self.rng.random() < 0.7


def speculating(engine: Engine, outputs: dict[str, list[int]], seed: int = 0) -> Engine:
    Guesses(engine, outputs, seed)
    return engine


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_turns_of_all_kinds_say_the_same_with_and_without_drafts(size: int, overlap: bool) -> None:
    plain = Engine(SMALL, overlap_schedule=False, **TIGHT)
    outputs = play(plain)
    given: dict[str, Any] = {"overlap_schedule": overlap, "speculative_algorithm": "NGRAM", **TIGHT}
    for seed in range(2):
        engine = speculating(Engine(SMALL, **given) if size == 1 else GroupEngine(size, SMALL, **given), outputs, seed)
        assert play(engine) == outputs
        assert engine.scheduler.num_retracted > 0, "pages ran out"
        accepted = engine.leader.counters["accepted_draft_tokens_ngram"]
        assert 0 < accepted < engine.leader.counters["draft_tokens_ngram"]
        for turn_id in outputs:
            *said, logprobs = outcome(plain, turn_id)
            assert (*said, pytest.approx(logprobs, abs=1e-4)) == outcome(engine, turn_id), turn_id
        if isinstance(engine, GroupEngine):
            assert not engine.refused
            engine.stop()


def test_pages_are_held_for_a_draft_in_its_step_alone() -> None:
    plain = Engine(SMALL, page_size=1)
    outputs = {"t": plain.generate("s", prompt(1, 9), LONG)}
    engine = Engine(SMALL, page_size=1, overlap_schedule=False, speculative_algorithm="NGRAM")
    speculating(engine, outputs)
    engine.submit("t", "s", prompt(1, 9), LONG)
    slot = None
    while engine.scheduler.turns:
        engine.leader.step()
        slot = engine.cache.slots["s"]
        assert slot.committed_len == slot.allocated_len == len(slot.tables[0].pages), "the tail is cut"
        assert engine.cache.audit().ok
    assert engine.output("t") == outputs["t"]
    assert slot is not None and slot.committed_len == 9 + 24 - 1, "as a turn without drafts leaves it"


def test_a_guess_evicts_nothing_and_retracts_nothing() -> None:
    """An idle session's pages are worth more than a draft."""
    given: dict[str, Any] = {"max_total_tokens": 48, "page_size": 4, "overlap_schedule": False}
    outputs = {"t": Engine(SMALL, **given).generate("s", prompt(2, 10), LONG)}
    engine = Engine(SMALL, speculative_algorithm="NGRAM", **given)
    engine.generate("idle", prompt(1, 7), SamplingParams(max_tokens=1))
    Guesses(engine, outputs)
    engine.submit("t", "s", prompt(2, 10), LONG)
    while engine.scheduler.turns:
        held = {name: len(slot.tables[0].pages) for name, slot in engine.cache.slots.items() if name != "s"}
        short = engine.cache.num_free()[0] == 0
        engine.leader.step()
        slot = engine.cache.slots["s"]
        if short and slot.committed_len % 4:
            assert {n: len(s.tables[0].pages) for n, s in engine.cache.slots.items() if n != "s"} == held
    assert engine.output("t") == outputs["t"] and engine.scheduler.num_retracted == 0


@pytest.mark.parametrize("at", range(1, 9))
def test_nothing_past_an_end_is_shown_committed_or_counted(at: int) -> None:
    """A draft that is right beyond the token that ends the turn: by a stop token, a stop string, or the length."""
    free = Engine(SMALL).generate("free", prompt(4, 13), LONG)
    text = {
        "token": SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=frozenset({free[at]})),
        "length": SamplingParams(max_tokens=at, ignore_eos=True),
    }
    for kind, params in text.items():
        plain = Engine(SMALL, page_size=4)
        expected = plain.generate("s", prompt(4, 13), params)
        engine = Engine(SMALL, page_size=4, overlap_schedule=False, speculative_algorithm="NGRAM")
        guesses = Guesses(engine, {"t": free})
        guesses.rng.choice = lambda options: (8, 0)  # type: ignore[method-assign, assignment]
        engine.submit("t", "s", prompt(4, 13), params)
        engine.run()
        assert engine.output("t") == expected, kind
        assert engine.last("t").finish == plain.last("turn-0").finish
        ours, theirs = engine.cache.slots["s"], plain.cache.slots["s"]
        assert ours.tokens == theirs.tokens and ours.committed_len == theirs.committed_len == ours.allocated_len
        assert len(ours.tables[0].pages) == len(theirs.tables[0].pages)
        drafts = engine.last("t").drafts
        assert drafts is None or drafts.accepted <= len(expected)


def test_what_ends_a_turn_inside_a_draft_shows_nothing_more() -> None:
    """An abort, a release and a later owner between a draft's launch and its results."""
    outputs = {"t": Engine(SMALL).generate("s", prompt(1, 10), LONG)}
    for end in ("abort", "release", "end"):
        engine = Engine(SMALL, speculative_algorithm="NGRAM")
        guesses = Guesses(engine, outputs)
        guesses.rng.choice = lambda options: (3, 3)  # type: ignore[method-assign, assignment]
        guesses.pays = lambda num_rows: True  # type: ignore[method-assign]
        engine.submit("t", "s", prompt(1, 10), LONG)
        while engine.leader._in_flight is None or not any(w.draft for w in engine.leader._in_flight.step.work):
            engine.leader.step()
        shown = len(engine.output("t"))
        if end == "abort":
            engine.leader.abort("t")
        elif end == "release":
            engine.leader.release_session("s", 1)
        else:
            engine.leader.end_all(Finish("abort", "the worker stops"))
        engine.commands()
        engine.leader.step()
        engine.leader.step()
        assert len(engine.output("t")) == shown and engine.cache.audit().ok
        assert all(slot.committed_len == slot.allocated_len for slot in engine.cache.slots.values())
        engine.submit("u", "s", prompt(1, 10), LONG, epoch=3)
        outputs["u"] = outputs["t"]
        engine.run()
        assert engine.output("u") == outputs["t"]


def test_a_thousand_turns_with_drafts_leave_no_page_behind() -> None:
    engine = Engine(SMALL, max_total_tokens=256, page_size=4, overlap_schedule=False, speculative_algorithm="NGRAM")
    eager(engine.leader)
    rng, free = random.Random(3), sum(engine.cache.num_free())
    for i in range(1000):
        session = f"s{i % 5}"
        known = list(engine.cache.slots[session].tokens) if session in engine.cache.slots else []
        tokens = [*known[: rng.randint(0, 20)], *prompt(i % 3, rng.randint(1, 8))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 12),
            ignore_eos=True,
            temperature=rng.choice([0.0, 1.0]),
            seed=i,
            logit_bias=TWO_WORDS,
        )
        engine.submit(f"t{i}", session, tokens, params)
        engine.run()
        if rng.random() < 0.2:
            engine.leader.release_session(session, 1)
            engine.commands()
        assert engine.cache.audit().ok
    assert engine.leader.counters["draft_tokens_ngram"] > 100
    engine.leader.flush()
    engine.commands()
    assert sum(engine.cache.num_free()) == free


def test_a_retracted_turn_takes_the_tokens_of_its_draft() -> None:
    outputs = {"t": Engine(SMALL).generate("s", prompt(1, 10), LONG)}
    engine = Engine(SMALL, speculative_algorithm="NGRAM")
    Guesses(engine, outputs).pays = lambda num_rows: True  # type: ignore[method-assign]
    engine.submit("t", "s", prompt(1, 10), LONG)
    num_retracted = 0
    while engine.scheduler.turns:
        engine.leader.step()
        if engine.leader._in_flight is not None and any(w.draft for w in engine.leader._in_flight.step.work):
            engine.scheduler.retract_all()
            num_retracted += 1
        assert engine.cache.audit().ok
    assert num_retracted > 2 and engine.output("t") == outputs["t"]


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(Exception, match="speculative_algorithm"):
        Engine(SMALL, speculative_algorithm="GUESS")


def test_a_repetition_is_copied_and_counted() -> None:
    """The real lookup, on a model that repeats itself when it is forced to."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias=TWO_WORDS[:1])
    engine = Engine(SMALL, overlap_schedule=False, speculative_algorithm="NGRAM")
    eager(engine.leader)
    assert engine.generate("s", prompt(1, 10), params) == [50] * 40
    drafts = engine.last("turn-0").drafts
    assert drafts is not None and drafts.accepted >= 20 and drafts.verify_steps <= 15
    assert engine.leader.counters["steps"] < 25


def test_a_prediction_is_a_draft_from_its_first_token_on() -> None:
    engine = Engine(SMALL, overlap_schedule=False)
    output = engine.generate("s", prompt(1, 10), LONG)
    for prediction in (output, [*output[:9], 7, 7, *output[10:]]):
        other = Engine(SMALL, overlap_schedule=False, speculative_algorithm="NGRAM")
        eager(other.leader)
        other.submit("t", "s", prompt(1, 10), LONG, prediction=new_tokens(prediction))
        other.run()
        drafts = other.last("t").drafts
        assert other.output("t") == output
        assert drafts is not None and drafts.prediction_accepted >= 14
        assert other.leader.counters["accepted_draft_tokens_prediction"] == drafts.prediction_accepted
        assert other.leader.counters["steps"] < 16
