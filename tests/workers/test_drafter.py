"""Lookups: what is found is right, whatever the sequence went through, and costs what it should."""

from __future__ import annotations

import math
import random
from array import array
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from workers.scheduling import SamplingParams, Speculation, Turn
from workers.scheduling.drafter import MAX_RECENT, NgramDrafter
from workers.scheduling.ngram import NEAR, SIZES, NgramIndex, Source, key_of
from workers.scheduling.speculation import LOOK_AGAIN, StepCosts

TOKENS = st.lists(st.integers(0, 3), min_size=SIZES[-1], max_size=120)


def turn_of(tokens: list[int], prompt_len: int, turn_id: str = "t", **more: object) -> Turn:
    given = {"session_id": "s", "tenant": "a", "keep_len": 0} | more
    return Turn(
        turn_id, tokens=array("i", tokens), prompt_len=prompt_len, params=SamplingParams(max_tokens=999), **given
    )  # type: ignore[arg-type]


def last_occurrence(tokens: list[int], n: int) -> int:
    """The last position before the end that follows the ``n`` tokens at the end; 0: none."""
    for position in range(len(tokens) - 1, n - 1, -1):
        if tokens[position - n : position] == tokens[-n:]:
            return position
    return 0


def collide(source: Source, tokens: list[int]) -> bool:
    """Whether other n-grams have the place of those at the end: of two in one place, the last is known."""
    mask = len(source.index) // 2 - 1
    keys = [key_of(array("i", tokens[:end])) if end >= SIZES[-1] else (0, 0) for end in range(len(tokens) + 1)]
    return any(
        keys[i][kind] & mask == keys[-1][kind] & mask
        for kind, n in enumerate(SIZES)
        for i in range(n, len(tokens))
        if tokens[i - n : i] != tokens[-n:]
    )


def test_of_two_grams_in_one_place_the_last_is_known() -> None:
    tokens = [3, 2, 3, 2, 0, 2, 3, 2, 3]
    source = Source(array("i", tokens))
    assert collide(source, tokens) and source.find(source.tokens, key_of(source.tokens), repeats=True) is None


@settings(deadline=None)
@given(tokens=TOKENS, ends=st.lists(st.integers(1, 120), max_size=8))
def test_the_last_occurrence_of_the_longest_match_is_found(tokens: list[int], ends: list[int]) -> None:
    source = Source(array("i", tokens))
    for end in sorted(ends):  # in any pieces, by any of the ways
        source.index.extend(source.tokens, min(end, len(tokens) - 1))
    match = source.find(source.tokens, key_of(source.tokens), repeats=True)
    long, short = (last_occurrence(tokens, n) if len(tokens) >= n else 0 for n in SIZES)
    assert (match.position if match is not None else 0) == (long or short) or collide(source, tokens)
    if match is not None:
        length = match.length
        assert tokens[match.position - length : match.position] == tokens[len(tokens) - length :]
        block = tokens[match.position :]
        assert match.draft(20).tolist() == (block * 20)[:20], "a repetition goes on"


def test_an_index_is_the_same_made_at_once_or_step_by_step() -> None:
    tokens = array("i", random.Random(1).choices(range(150_000), k=3000))
    at_once, by_steps = NgramIndex(), NgramIndex()
    at_once.extend(tokens, 2999)
    for end in range(3000):
        by_steps.extend(tokens, end)
    # It grew on the way, and older entries came later then: of equal slots another position may be there.
    same = sum(a == b for a, b in zip(at_once._long, by_steps._long, strict=True))
    assert same > 0.9 * len(at_once._long)


def test_a_rewound_session_finds_no_stale_match() -> None:
    drafter = NgramDrafter()
    first = turn_of([1, 2, 3, 4, 5, 6, 7, 8, 9], 9)
    drafter.begin(first)
    drafter.receive(first)
    drafter.forget(first)
    # The session was cut to three tokens and went another way.
    second = turn_of([1, 2, 3, 9, 9, 9, 4, 5, 6], 9, "u", keep_len=3)
    drafter.begin(second)
    drafter.receive(second)
    match = drafter.matches.get(second)
    assert match is None or second.tokens[match.position - 3 : match.position] == second.tokens[-3:]


def test_nothing_of_another_tenant_or_of_a_released_session_is_proposed() -> None:
    output = [*range(50, 90)]
    for tenant, release, found in (("a", False, True), ("b", False, False), ("a", True, False)):
        drafter = NgramDrafter()
        said = turn_of([1, 2, *output], 2)
        drafter.begin(said)
        drafter.forget(said)
        if release:
            drafter.release("s")
        other = turn_of([7, *output[:6]], 1, "u", session_id="other", tenant=tenant)
        drafter.begin(other)
        drafter.receive(other)
        assert (other in drafter.matches) == found
        assert not found or drafter.matches[other].draft(5).tolist() == output[6:11]


def test_recent_outputs_are_bounded() -> None:
    drafter, rng = NgramDrafter(), random.Random(2)
    for i in range(200):
        turn = turn_of([1, *rng.choices(range(1000), k=3000)], 1, f"t{i}", session_id=f"s{i}", ephemeral=True)
        drafter.begin(turn)
        drafter.forget(turn)
    recent = drafter._recent["a"]
    assert MAX_RECENT <= len(recent.source.tokens) <= 2 * MAX_RECENT and not drafter._indexes
    assert len(recent.sessions) < 50, "nor are the names of all who ever said something kept"
    kept = {f"s{i}" for i in range(200 - MAX_RECENT // 3001, 200)}
    assert kept <= set(recent.sessions), "but those of all whose output is"


def test_a_draft_ends_before_an_end_token_and_between_outputs() -> None:
    speculation = Speculation(16)
    said = turn_of([1, *range(50, 70)], 1)
    speculation.begin(said)
    speculation.forget(said)
    for end_tokens, expected in (({60}, [56, 57, 58, 59]), (set(), [*range(56, 70)])):
        turn = turn_of([2, *range(50, 56)], 1, f"u{len(expected)}", session_id="x", end_tokens=frozenset(end_tokens))
        speculation.begin(turn)
        speculation.receive(turn, None, 0)
        draft = speculation.propose(turn, 16, 1)
        assert draft is not None and draft.tokens.tolist() == expected[: len(draft.tokens)]
        assert len(draft.tokens) == len(expected) or not end_tokens
        speculation.forget(turn)


def test_drafts_are_as_long_as_they_pay() -> None:
    """The chance of a place against its share of a step: dear tokens are drafted only where they are sure."""

    def count(slope: float, held: float, num_rows: int) -> int:
        speculation, rng = Speculation(16), random.Random(3)
        for _ in range(300):
            n = rng.choice([num_rows, num_rows + 8])
            speculation.costs.observe(n, 0.01 + slope * n)
        pattern = [*range(10, 60)]
        turn = turn_of([*pattern, *pattern[:10]], 60)
        speculation.begin(turn)
        for i in range(10, 50):
            speculation.receive(turn, None, 0)
            if turn in speculation._drafter.matches:
                for _ in range(5):
                    speculation._rates[turn].observe(20, right := rng.random() < held, not right)
            turn.tokens.append(pattern[i])
        draft = speculation.propose(turn, 16, num_rows)
        return len(draft.tokens) if draft is not None else 0

    assert count(1e-6, 0.9, 1) == 16, "a token more costs nothing"
    assert 0 < count(0.01, 0.95, 1) < 16
    assert count(0.01, 0.3, 1) == 0, "half of the step, for a third of a token"
    assert count(0.01, 0.95, 16) <= count(0.01, 0.95, 1), "many rows fill the step"


@pytest.mark.parametrize("holds", [True, False])
def test_a_match_that_does_not_pay_is_looked_at_from_time_to_time(holds: bool) -> None:
    speculation, pattern, least, num_looks = Speculation(16), [*range(10, 60)], 2.0, 0
    speculation.costs.break_even = lambda num_rows, draft_s=0.0: least  # type: ignore[method-assign]
    turn = turn_of([*pattern, *pattern[:10]], 60)
    speculation.begin(turn)
    for token in [*pattern[10:35], pattern[35] if holds else 5]:
        assert speculation.candidates(1) == []
        if len(turn.tokens) >= turn.look_at:
            speculation.receive(turn, None, 0)
            num_looks += 1
        turn.tokens.append(token)
    assert turn in speculation._drafter.matches and num_looks <= 2 + 25 // LOOK_AGAIN
    least = 0.0
    assert speculation.candidates(1) == [turn], "now it pays"
    draft = speculation.propose(turn, 8, 1)
    assert draft is None if not holds else draft is not None and draft.tokens.tolist() == pattern[36:44]


def test_the_costs_of_steps_are_a_line_that_delays_do_not_bend() -> None:
    costs, rng = StepCosts(), random.Random(4)
    for i in range(400):
        n = rng.choice([4, 4, 4, 5, 9, 68])
        delay = 40 if i % 50 == 0 else 1
        costs.observe(n, (0.004 + 0.0005 * n) * delay)
        assert 0 <= costs.slope <= costs.cost(n) / n + 1e-9, "no token takes more than its share"
        if i > 60:
            assert 0.0003 < costs.slope < 0.0008, i
    assert 0 < costs.break_even(1) < costs.break_even(16) < 1


@example([(4, 0.004), (1, 0.0001)] * 4, 0)  # no line fits: a step seems to cost its tokens and nothing else
@given(st.lists(st.tuples(st.integers(1, 512), st.sampled_from([0.0, 1e-9, 0.002, 0.4]))), st.integers(0, 64))
def test_any_step_has_a_break_even(steps: list[tuple[int, float]], num_rows: int) -> None:
    """Also one of no turns: the only turn that may have a draft waits."""
    costs = StepCosts()
    for num_tokens, seconds in steps:
        costs.observe(num_tokens, seconds)
    assert 0 <= costs.break_even(num_rows) < math.inf
    if num_rows:
        assert costs.break_even(num_rows) <= 1 + 1e-9, "tokens that are right pay, or cost what they bring"


def test_a_dear_draft_is_not_remembered_for_ever() -> None:
    """Else one slow step would end drafts for good: without them nothing more is learned of their cost."""
    costs = StepCosts()
    for _ in range(20):
        costs.observe(16, 0.002)
    before = costs.break_even(16)
    for _ in range(3):
        costs.observe(272, 0.4)
    assert costs.break_even(16) > 0.95
    for _ in range(120):
        costs.observe(16, 0.002)
    assert costs.break_even(16) < 1.1 * before


def followed_to(prediction: list[int], output: list[int]) -> tuple[NgramDrafter, Turn]:
    """A turn that has said ``output``, a token at a time."""
    drafter, turn = NgramDrafter(), turn_of([1, 2], 2, prediction=array("i", prediction))
    drafter.begin(turn)
    for token in output:
        turn.tokens.append(token)
        drafter.receive(turn)
    return drafter, turn


@given(st.integers(3, 60), st.integers(0, NEAR - 2), st.integers(0, NEAR - 3))
def test_a_prediction_continues_right_after_an_edit(kept: int, num_gone: int, num_new: int) -> None:
    """Two tokens of what follows are enough: of those of a failed lookup's two, one is looked up."""
    prediction = list(range(100, 200))
    after = kept + num_gone
    output = [*prediction[:kept], *range(900, 900 + num_new), *prediction[after : after + 2]]
    drafter, turn = followed_to(prediction, output)
    assert drafter.matches[turn].draft(5).tolist() == prediction[after + 2 : after + 7]
    assert drafter.is_predicted(turn, drafter.matches[turn])


def test_one_equal_token_is_chance_far_from_where_the_prediction_was_left() -> None:
    prediction, new = list(range(100, 200)), list(range(900, 900 + NEAR))
    for output in ([*prediction[:20], *new, prediction[25]], [*prediction[:20], *new[:3], prediction[20 + NEAR]]):
        drafter, turn = followed_to(prediction, output)
        assert turn not in drafter.matches


def test_an_equal_token_that_does_not_continue_is_not_where_the_next_is_sought_from() -> None:
    prediction = list(range(100, 200))
    drafter, turn = followed_to(prediction, [*prediction[:20], prediction[30], 900, prediction[22], prediction[23]])
    assert drafter.matches[turn].draft(2).tolist() == prediction[24:26]


def lookups(drafter: NgramDrafter, turn: Turn, output: list[int]) -> list[int]:
    """The output's lengths at which the drafter wanted the turn's tokens."""
    lengths = []
    for length, token in enumerate(output, 1):
        turn.tokens.append(token)
        if len(turn.tokens) >= turn.look_at:
            drafter.receive(turn)
            lengths.append(length)
    return lengths


def test_a_turn_that_finds_nothing_is_looked_up_ever_less_often() -> None:
    drafter, turn = NgramDrafter(), turn_of([1, 2, 3, 4, 5, 6, 7, 8], 8)
    drafter.begin(turn)
    assert lookups(drafter, turn, list(range(100, 400))) == [1, 3, 7, 15, 31, 63, 127, 191, 255]


def test_a_turn_that_has_matched_is_looked_up_every_sixteen_tokens_at_least() -> None:
    drafter, turn = NgramDrafter(), turn_of([1, 2, 3, 4, 5, 6, 7, 8], 8)
    drafter.begin(turn)
    lookups(drafter, turn, [1, 2, 3, 4, 5, 50])
    unmatched = lookups(drafter, turn, list(range(100, 400)))
    assert max(b - a for a, b in pairwise(unmatched)) == 16


def test_of_tokens_that_come_together_those_are_counted_that_held() -> None:
    drafter, turn = NgramDrafter(), turn_of([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3], 11)
    drafter.begin(turn)
    assert drafter.receive(turn) == (0, 0, False)
    turn.tokens.extend([4, 5])
    assert drafter.receive(turn) == (3, 2, False)
    turn.tokens.extend([6, 50, 8])
    assert drafter.receive(turn) == (5, 1, True)
    turn.tokens.append(9)
    assert drafter.receive(turn) == (0, 0, False)
