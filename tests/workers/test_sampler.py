"""The sampler: filters, penalties, and noise that depends on seed and position alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import torch

from workers.engine.sampler import SamplingRow, gumbel_noise, logprobs_of, sample
from workers.scheduling import SamplingParams

PARAMS = SamplingParams(temperature=1.0)
VOCAB = 64


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def draw(logits: torch.Tensor, params: SamplingParams, count: int = 400) -> Counter[int]:
    rows = [SamplingRow(replace(params, seed=seed), [1, 2], 2) for seed in range(count)]
    return Counter(sample(logits.repeat(count, 1), rows).tolist())


def test_noise_is_a_function_of_seed_and_position() -> None:
    device = torch.device("cpu")
    keys = [(1, 5), (1, 6), (2, 5), (2**62, 10**6)]
    batch = gumbel_noise(keys, VOCAB, device)
    for i, key in enumerate(keys):
        assert torch.equal(batch[i], gumbel_noise([key], VOCAB, device)[0])
    assert len({tuple(row.tolist()) for row in batch}) == 4
    longer = gumbel_noise([(1, 5)], 2 * VOCAB, device)
    assert torch.equal(longer[0, :VOCAB], batch[0])


def test_noise_is_gumbel() -> None:
    noise = gumbel_noise([(seed, 0) for seed in range(50)], 4000, torch.device("cpu"))
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
    rows = [SamplingRow(p, [3, 9, 9, 9], 2) for p in params]
    together = sample(logits.clone(), rows)
    assert together.tolist() == [sample(logits[i : i + 1].clone(), rows[i : i + 1]).item() for i in range(5)]


def test_a_bias_is_added_to_its_tokens_alone() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0], [1.0, 2.0, 3.0, 0.0]])
    biased = SamplingRow(SamplingParams(logit_bias=((0, 5.0), (2, -100.0))), [0], 1)
    assert sample(logits, [biased, SamplingRow(SamplingParams(), [0], 1)]).tolist() == [0, 2]
    assert logits.tolist() == [[6.0, 2.0, -97.0, 0.0], [1.0, 2.0, 3.0, 0.0]]


def test_penalties_count_the_right_tokens() -> None:
    flat = torch.zeros(1, 4)
    row = SamplingRow(SamplingParams(presence_penalty=1.0, frequency_penalty=0.5), [0, 1, 1, 2], 1)
    seen = flat.clone()
    sample(seen, [row])
    assert seen[0].tolist() == [0.0, -2.0, -1.5, 0.0], "the prompt does not count"
    both = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    sample(both, [SamplingRow(SamplingParams(repetition_penalty=2.0), [0, 1], 1)])
    assert both[0].tolist() == [1.0, -4.0, 2.0, -2.0], "the prompt does count"


def test_banned_tokens_are_never_chosen() -> None:
    rows = [SamplingRow(SamplingParams(), [1], 1, banned=(1,))]
    assert sample(logits_of([0.2, 0.5, 0.3]), rows).tolist() == [2]


def test_logprobs_are_the_models_own() -> None:
    result = logprobs_of(logits_of([0.2, 0.5, 0.3]).repeat(2, 1), [0, 2], [0, 2], [(), (0, 1)])
    assert [item.rank for item in result] == [3, 2]
    assert math.isclose(result[0].logprob, math.log(0.2), rel_tol=1e-5) and result[0].top == ()
    assert [token for token, _ in result[1].top] == [1, 2]
