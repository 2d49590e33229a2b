"""Text that a grammar leaves no choice in is drafted, and every token is right."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from typing import Any

import pytest

import workers.grammar.turns
from tests.workers.engine import SMALL, Engine, eager
from tests.workers.groups import GroupEngine
from tests.workers.test_grammars import COMPILER, params, prompt, submit, text_of
from workers.grammar.turns import TurnGrammars
from workers.scheduling import Draft, SamplingParams, Turn, Work

NAMES = ("temperature_of_the_room", "name_of_the_location", "was_measured_by_hand")
SCHEMA = {
    "type": "object",
    "properties": {name: {"enum": ["a", "b", "c"]} for name in NAMES},
    "required": NAMES,
    "additionalProperties": False,
}
FORCED = params("json_schema", SCHEMA, 3)
DRAFTING: dict[str, Any] = {"speculative_algorithm": "NGRAM"}


def said(engine: Engine, given: SamplingParams = FORCED, **more: Any) -> tuple[list[int], Any]:
    turn_id = f"t{len(engine.updates)}"
    submit(engine, turn_id, turn_id, prompt(1), given, **more)
    engine.run()
    return engine.output(turn_id), engine.last(turn_id).finish


def counts(engine: Engine, source: str = "grammar") -> tuple[int, int]:
    """Tokens drafted, and accepted."""
    counters = engine.leader.counters
    return counters[f"draft_tokens_{source}"], counters[f"accepted_draft_tokens_{source}"]


def drafting(**changes: Any) -> Engine:
    engine = Engine(SMALL, **DRAFTING, **changes)
    eager(engine.leader)
    return engine


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_forced_comes_in_few_steps(size: int, overlap: bool) -> None:
    plain = Engine(overlap_schedule=False)
    engine = GroupEngine(size, SMALL, overlap_schedule=overlap, **DRAFTING) if size > 1 else drafting()
    eager(engine.leader)
    expected = said(plain)
    assert said(engine) == expected
    assert set(json.loads(text_of(plain, "t0"))) == set(NAMES)
    drafted, accepted = counts(engine)
    assert drafted == accepted > 12
    assert engine.leader.counters["steps"] < plain.leader.counters["steps"] - 10
    if isinstance(engine, GroupEngine):
        assert not engine.refused
        engine.stop()


def test_a_replay_is_drafted_from_the_middle_of_a_word_on() -> None:
    output, finish = said(Engine())
    for shown in range(1, len(output) - 1):
        engine = drafting()
        submit(engine, "t", "s", prompt(1) + output[:shown], FORCED, prompt_len=len(prompt(1)))
        engine.run()
        assert (output[:shown] + engine.output("t"), engine.last("t").finish) == (output, finish)
        drafted, accepted = counts(engine)
        assert drafted == accepted


def test_a_stop_token_ends_what_is_forced() -> None:
    plain, engine = Engine(), drafting()
    output, _ = said(plain)
    for token in set(output[4:12]):
        given = params("json_schema", SCHEMA, 3, stop_token_ids=frozenset([token]))
        assert said(engine, given) == said(plain, given)
        assert all(slot.committed_len == slot.allocated_len for slot in engine.cache.slots.values())


def test_a_long_text_is_drafted_once_little_of_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.grammar.turns, "MAX_FORCED_BYTES", 20)
    given = params("regex", "[ab]the first of many words that nobody has chosen but a grammar, which says them all[ab]")
    plain, engine = Engine(), drafting()
    assert said(engine, given) == said(plain, given)
    assert 0 < counts(engine)[0] <= 20 < len(engine.output("t0"))


def test_nothing_is_drafted_where_a_right_token_does_not_pay() -> None:
    engine = drafting()
    speculation = engine.leader.drafts.speculation
    assert speculation is not None
    speculation.costs.break_even = lambda num_rows, draft_s=0.0: 1.0  # type: ignore[method-assign]
    assert said(engine) == said(Engine())
    assert counts(engine) == (0, 0)


@pytest.mark.parametrize("right", [False, True])
def test_a_lookup_that_has_all_that_is_forced_continues_it(right: bool) -> None:
    output, _ = said(Engine())
    engine = drafting(overlap_schedule=False)

    def propose(turn: Turn, limit: int, num_rows: int) -> Draft | None:
        draft = output[turn.num_output :][:limit] if right else [7] * limit
        return Draft(array("i", draft)) if draft else None

    speculation = engine.leader.drafts.speculation
    assert speculation is not None
    speculation.propose = propose  # type: ignore[method-assign]
    speculation.candidates = lambda num_rows: list(engine.scheduler.running.values())  # type: ignore[method-assign]
    assert said(engine)[0] == output
    assert (counts(engine)[0] == 0) == right
    assert (counts(engine, "ngram")[1] > 20) == right


def allowed(mask: bytes) -> list[int]:
    return [token for token in range(min(2048, 8 * len(mask))) if mask[token // 8] >> token % 8 & 1]


def drafts(turn: Turn, forced: list[int], followed: TurnGrammars, rng: random.Random) -> list[tuple[str, list[int]]]:
    """Drafts that the grammar allows: what is forced, a part, more than that, and tokens that leave it."""
    part = forced[: rng.randrange(len(forced) + 1)]
    wanted = [("part", part), ("all", forced)]
    for kind, begun in (("other tokens for the same text", part), ("beyond", forced)):
        fitting = [
            token for token in range(5, 2048) if followed.allowed(turn, array("i", [*begun, token])) > len(begun)
        ]
        if rest := [token for token in fitting if [*begun, token] != forced[: len(begun) + 1]]:
            wanted.append((kind, [*begun, rng.choice(rest)]))
    return wanted


@pytest.mark.parametrize(
    "given",
    [FORCED, params("regex", "[ab]+(one of|two of) the many words, and then a few[0-9]+ more of them[ab]*")],
    ids=["schema", "regex"],
)
def test_masks_are_those_of_a_matcher_that_looks_at_nothing_ahead(given: SamplingParams) -> None:
    assert given.grammar is not None
    rng, seen = random.Random(5), Counter[str]()
    turn = Turn("t", "s", "", array("i", [5, 6]), 2, 0, given)
    looking, plain = TurnGrammars(COMPILER), TurnGrammars(COMPILER)
    looking.looks_ahead = True
    for grammars in (looking, plain):
        grammars.begin(turn, COMPILER.compile(given.grammar))
    try:
        for _ in range(80):
            forced = looking.forced.get(turn, array("i")).tolist()
            for kind, draft in drafts(turn, forced, looking, rng):
                work = Work(turn, 0, 0, 1, True, Draft(array("i", draft)) if draft else None)
                masks = [grammars.masks([work]) for grammars in (looking, plain)]
                of_both = [[allowed(mask) for mask in of.result()["t"]] for of in masks if of is not None]
                assert of_both[0] == of_both[1] and len(of_both[0]) == len(draft) + 1, (kind, draft, forced)
                seen[kind] += bool(forced)
            choices = [token for token in of_both[0][0] if token not in (0, 4)]
            if not choices:
                break
            turn.tokens.append(rng.choice(choices))
            looking.push(turn)
            plain.push(turn)
    finally:
        looking.close()
        plain.close()
    assert min(seen[kind] for kind in ("part", "all", "other tokens for the same text", "beyond")) > 2, seen
