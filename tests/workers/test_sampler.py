"""The sampler: filters, penalties, and noise that depends on seed and position alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from workers.engine.choice import Choice, StepResult
from workers.engine.penalties import PenaltyCounts
from workers.engine.sampler import Places, Restrictions, sample
from workers.kernels.noise import gumbel_noise, mixing_keys
from workers.kv.slot import new_tokens
from workers.scheduling import Draft, SamplingParams, Turn, Work

PARAMS = SamplingParams(temperature=1.0)
VOCAB = 64
CPU = torch.device("cpu")


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def turn_of(params: SamplingParams, tokens: Sequence[int], prompt_len: int) -> Turn:
    return Turn(f"t{id(params)}", "s", "", new_tokens(tokens), prompt_len, 0, params)


def sampled(
    logits: torch.Tensor, turns: list[Turn], banned: dict[int, Any] | None = None, masks: dict[int, bytes] | None = None
) -> list[int]:
    """What ``sample`` chooses for turns that it has not seen before."""
    places, restricted = Places(turns), Restrictions(banned or {}, masks or {})
    return sample(logits, places, restricted, PenaltyCounts(logits.shape[-1], CPU)).tolist()


def draw(logits: torch.Tensor, params: SamplingParams, count: int = 400) -> Counter[int]:
    rows = [turn_of(replace(params, seed=seed), [1, 2], 2) for seed in range(count)]
    return Counter(sampled(logits.repeat(count, 1), rows))


def noise_of(places: list[tuple[int, int]], vocab_size: int) -> torch.Tensor:
    return gumbel_noise(torch.frombuffer(mixing_keys(places), dtype=torch.int32), vocab_size)


def test_noise_is_a_function_of_seed_and_position() -> None:
    keys = [(1, 5), (1, 6), (2, 5), (2**62, 10**6)]
    batch = noise_of(keys, VOCAB)
    for i, key in enumerate(keys):
        assert torch.equal(batch[i], noise_of([key], VOCAB)[0])
    assert len({tuple(row.tolist()) for row in batch}) == 4
    longer = noise_of([(1, 5)], 2 * VOCAB)
    assert torch.equal(longer[0, :VOCAB], batch[0])


def test_noise_is_gumbel() -> None:
    noise = noise_of([(seed, 0) for seed in range(50)], 4000)
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.std() - math.pi / math.sqrt(6)) < 0.01
    between = torch.corrcoef(noise[:8])
    assert (between - torch.eye(8)).abs().max() < 0.06


def test_draws_follow_the_distribution() -> None:
    counts = draw(logits_of([0.6, 0.3, 0.1]), PARAMS, 4000)
    for token, p in enumerate([0.6, 0.3, 0.1]):
        assert abs(counts[token] / 4000 - p) < 0.03


def test_greedy_takes_the_likeliest() -> None:
    assert draw(logits_of([0.2, 0.5, 0.3]), SamplingParams()) == Counter({1: 400})


def test_filters_keep_the_right_tokens() -> None:
    logits = logits_of([0.4, 0.3, 0.2, 0.1])
    assert set(draw(logits, replace(PARAMS, top_k=2))) == {0, 1}
    assert set(draw(logits, replace(PARAMS, top_p=0.65))) == {0, 1}
    assert set(draw(logits, replace(PARAMS, top_p=0.1))) == {0}
    assert set(draw(logits, replace(PARAMS, min_p=0.6))) == {0, 1}
    assert set(draw(logits, replace(PARAMS, temperature=0.01))) == {0}
    assert set(draw(logits, PARAMS)) == {0, 1, 2, 3}


def test_rows_do_not_disturb_each_other() -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(),
        replace(PARAMS, seed=4),
        replace(PARAMS, top_k=3, seed=5),
        replace(PARAMS, top_p=0.5, repetition_penalty=1.5, seed=6),
        replace(PARAMS, min_p=0.2, frequency_penalty=1.0, seed=7),
    ]
    rows = [turn_of(p, [3, 9, 9, 9], 2) for p in params]
    together = sampled(logits.clone(), rows)
    assert together == [sampled(logits[i : i + 1].clone(), rows[i : i + 1])[0] for i in range(5)]


def test_a_bias_is_added_to_its_tokens_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0], [1.0, 2.0, 3.0, 0.0]])
    biased = turn_of(SamplingParams(logit_bias=((0, 5.0), (2, -100.0))), [0], 1)
    assert sampled(logits, [biased, turn_of(SamplingParams(), [0], 1)]) == [0, 2]
    assert logits.tolist() == [[6.0, 2.0, -97.0, 0.0], [1.0, 2.0, 3.0, 0.0]]


def test_penalties_count_the_right_tokens() -> None:
    flat = torch.zeros(1, 4)
    row = turn_of(SamplingParams(presence_penalty=1.0, frequency_penalty=0.5), [0, 1, 1, 2], 1)
    seen = flat.clone()
    sampled(seen, [row])
    assert seen[0].tolist() == [0.0, -2.0, -1.5, 0.0], "the prompt does not count"
    both = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    sampled(both, [turn_of(SamplingParams(repetition_penalty=2.0), [0, 1], 1)])
    assert both[0].tolist() == [1.0, -4.0, 2.0, -2.0], "the prompt does count"


def test_banned_tokens_are_never_chosen() -> None:
    rows = [turn_of(SamplingParams(logit_bias=((1, 3.0),)), [1], 1)]
    assert sampled(logits_of([0.2, 0.5, 0.3]), rows, {0: (1,)}) == [2]


def test_counts_that_are_kept_are_those_that_are_counted_afresh() -> None:
    """Turns come and go, and rows are used again; a step brings each turn's new tokens alone."""
    rng = random.Random(0)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3)
    kept, turns = PenaltyCounts(VOCAB, CPU), []
    for _ in range(60):
        turns = [turn for turn in turns if not turn.ended]
        if len(turns) < 12:
            tokens = rng.choices(range(VOCAB), k=rng.randint(1, 9))
            turns.append(turn_of(params, tokens, rng.randint(1, len(tokens))))
        some = rng.sample(turns, rng.randint(1, len(turns)))
        logits = torch.randn(len(some), VOCAB)
        ours, theirs = logits.clone(), logits.clone()
        tokens = sample(ours, Places(list(some)), Restrictions(), kept).tolist()
        assert tokens == sampled(theirs, some) and torch.equal(ours, theirs)
        for turn, token in zip(some, tokens, strict=True):
            turn.receive([token])
            turn.ended = rng.random() < 0.1
    assert len(kept._seen) <= 24, "as many rows as turns, by powers of two"


def test_a_token_after_a_draft_is_chosen_as_after_the_same_tokens() -> None:
    """Noise, penalties, what is banned: all depend on the tokens before, drafted or known."""
    rng = random.Random(1)
    kinds = [
        SamplingParams(temperature=0.9, top_k=20, seed=4, max_tokens=99),
        SamplingParams(temperature=1.1, seed=5, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.2),
        SamplingParams(min_tokens=5, stop_token_ids=frozenset(range(0, VOCAB, 3))),
    ]
    for params in kinds:
        tokens, drafted = rng.choices(range(VOCAB), k=7), rng.choices(range(VOCAB), k=4)
        turn = turn_of(params, tokens, 5)
        turn.end_tokens = params.stop_token_ids
        logits = torch.randn(5, VOCAB)
        work = Work(turn, 0, 6, 5, True, Draft(new_tokens(drafted)))
        together = chosen(logits.clone(), [work], [False]).tokens[turn.turn_id]
        alone = []
        for i in range(5):
            longer = turn_of(params, [*tokens, *drafted[:i]], 5)
            longer.end_tokens = params.stop_token_ids
            alone += chosen(logits[i : i + 1].clone(), [Work(longer, 0, 6, 1, True)], [False]).tokens[longer.turn_id]
        assert together == alone


def test_a_mask_may_end_within_a_word() -> None:
    allowed = sum(1 << token for token in (3, 40, 69))
    mask = allowed.to_bytes(9, "little")
    logits = torch.zeros(1, 70)
    logits[0, 68], logits[0, 69] = 9.0, 1.0
    assert sampled(logits, [turn_of(SamplingParams(), [0], 1)], masks={0: mask}) == [69]
    assert logits.isfinite().nonzero()[:, 1].tolist() == [3, 40, 69]
    logits = torch.zeros(2, 70)
    logits[:, 68], logits[:, 69] = 9.0, 1.0
    turns = [turn_of(SamplingParams(), [0], 1), turn_of(SamplingParams(), [0], 1)]
    assert sampled(logits, turns, masks={1: mask}) == [68, 69], "beside a row without one"


def chosen(logits: torch.Tensor, work: list[Work], ended: Sequence[bool]) -> StepResult:
    choice = Choice(work, ended, {})
    _, results = choice.queue(logits, PenaltyCounts(logits.shape[-1], CPU))
    return choice.read(results)


def test_logprobs_are_the_models_own() -> None:
    params = [
        SamplingParams(num_logprobs=0, logit_bias=((0, 9.0),)),
        SamplingParams(),
        SamplingParams(num_logprobs=2, logprob_token_ids=(0, 1)),
    ]
    turns = [turn_of(p, [1], 1) for p in params]
    work = [Work(turn, 0, 0, 1, True) for turn in turns]
    logits = logits_of([0.2, 0.5, 0.3]).repeat(3, 1)
    result = chosen(logits.clone(), work, [False] * 3)
    (first,), (third,) = (result.logprobs[turns[i].turn_id] for i in (0, 2))
    assert (first.token, first.rank, first.top) == (0, 3, ()) and turns[1].turn_id not in result.logprobs
    assert math.isclose(first.logprob, math.log(0.2), rel_tol=1e-5), "before the bias"
    assert [token for token, _ in third.top] == [1, 2] and (third.token, third.rank) == (1, 1)
    assert [token for token, _ in third.wanted] == [0, 1]
    assert math.isclose(third.wanted[0][1], math.log(0.2), rel_tol=1e-5)
    only = chosen(logits.clone(), work, [True, True, False])
    assert list(only.tokens) == [turns[2].turn_id] and only.logprobs[turns[2].turn_id] == [third]


def test_input_tokens_are_scored_beside_those_that_sample() -> None:
    scoring = turn_of(SamplingParams(num_logprobs=1, logprob_start=1), [0, 1, 2, 0, 1, 1], 6)
    plain = turn_of(SamplingParams(), [0], 1)
    work = [Work(scoring, 0, 0, 4, False, scored=range(1, 4)), Work(plain, 1, 0, 1, True)]
    logits = torch.cat([logits_of(p) for p in ([0.1, 0.1, 0.8], [0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.3, 0.3, 0.4])])
    result = chosen(logits, work, [False, False])
    assert result.tokens == {plain.turn_id: [2]} and not result.logprobs
    scored = result.input_logprobs[scoring.turn_id]
    assert [lp.token for lp in scored] == [2, 0, 1]
    assert [round(math.exp(lp.logprob), 3) for lp in scored] == [0.3, 0.6, 0.3]
    assert [lp.top[0][0] for lp in scored] == [1, 0, 2]
    assert not chosen(logits, work, [True, False]).input_logprobs
