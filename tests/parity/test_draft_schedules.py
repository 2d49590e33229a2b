"""Random schedules with drafts: the same tokens, ends and logprobs as turns that are computed alone, without any."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import AutoModelForCausalLM

from tests.parity.heads import write_eagle3
from tests.parity.matrix import CONFIG, KINDS, checkpoint
from tests.workers.engine import Engine, eager
from tests.workers.groups import GroupEngine
from tests.workers.test_speculation import TWO_WORDS, Guesses
from workers.engine import drafts, leader, pace
from workers.engine.penalties import PenaltyCounts
from workers.scheduling import Finish, Grammar, SamplingParams
from workers.scheduling.model_speculation import DraftJob

NUM_SCHEDULES, NUM_SCHEDULES_LONG = 40, 2000
WORDS = range(10, 1500)


def sampling(rng: random.Random) -> SamplingParams:
    params = rng.choice(
        [
            SamplingParams(),
            SamplingParams(temperature=0.8, top_k=40, num_logprobs=2),
            SamplingParams(temperature=1.0, logit_bias=TWO_WORDS, num_logprobs=0),
            SamplingParams(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.6),
            SamplingParams(temperature=1.0, min_tokens=4, stop_token_ids=frozenset(WORDS[::9])),
            SamplingParams(temperature=1.0, grammar=Grammar("regex", "(yes|no){1,4}", "regex")),
            SamplingParams(temperature=1.0, grammar=Grammar("regex", "(it was|nobody is) so when [a-z]*", "regex")),
            SamplingParams(temperature=0.7, stop=("e", "a")),
            SamplingParams(num_logprobs=1, logprob_start=0),
        ]
    )
    free = params.grammar is None and not params.stop
    return replace(params, seed=rng.randrange(4), max_tokens=rng.randint(1, 16), ignore_eos=free)


def make(kind: str, size: int, **changes: Any) -> Engine:
    config = replace(CONFIG, model=checkpoint(kind), **changes)
    return GroupEngine(size, config) if size > 1 else Engine(config)


def submit(engine: Engine, *given: Any, **more: Any) -> None:
    """Queue a turn, once its grammar is compiled."""
    engine.submit(*given, **more)
    while engine.leader.gate.num_waiting:
        time.sleep(0.0005)
        engine.commands()


def said(engine: Engine, turn_id: str) -> tuple[list[int], Finish | None, list[float]]:
    updates = engine.updates[turn_id]
    assert updates[-1].error is None, updates[-1].error
    logprobs = [lp.logprob for update in updates for lp in (*update.input_logprobs, *update.logprobs)]
    return engine.output(turn_id), updates[-1].finish, logprobs


NGRAM: dict[str, Any] = {"speculative_algorithm": "NGRAM"}


def with_draft_model(kind: str) -> dict[str, Any]:
    """The model itself, which is right wherever its drafts' KV is. Its weights are random: no other would be."""
    return {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": checkpoint(kind)}


@cache
def eagle3_head(kind: str) -> Path:
    folder = checkpoint(kind).with_name(checkpoint(kind).name + "-eagle3")
    write_eagle3(folder, AutoModelForCausalLM.from_pretrained(checkpoint(kind)))
    return folder


def with_head(kind: str, rng: random.Random) -> dict[str, Any]:
    """Of random weights: never right by itself."""
    if kind == "latent" and rng.random() < 0.5:
        return {"speculative_algorithm": "MTP"}
    return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": eagle3_head(kind)}


class Helped:
    """Has the drafts of a head begin with what turns would say, now and then."""

    def __init__(self, engine: Engine, outputs: dict[str, list[int]], rng: random.Random) -> None:
        drafter = engine.leader.rank._drafter
        assert drafter is not None
        self._propose, self._outputs, self._rng = drafter.propose, outputs, rng
        drafter.propose = self.propose  # type: ignore[method-assign]

    def propose(self, jobs: Sequence[DraftJob], counts: PenaltyCounts) -> tuple[dict[str, array[int]], int]:
        drafts, num_runs = self._propose(jobs, counts)
        for job in jobs:
            draft = drafts.get(job.turn.turn_id)
            if draft is not None:
                right = self._outputs[job.turn.turn_id][job.turn.num_output :]
                right = right[: self._rng.randint(0, len(draft))]
                draft[: len(right)] = array("i", right)
        return drafts, num_runs


class Oracle:
    """What turns say when each is computed alone, in one piece and without drafts."""

    def __init__(self, kind: str, size: int) -> None:
        self.engine = make(kind, size, chunked_prefill_size=512, overlap_schedule=False)
        self.answers: dict[Any, Any] = {}

    def says(self, tokens: list[int], params: SamplingParams) -> tuple[list[int], Finish | None, list[float]]:
        key = (tuple(tokens), params)
        if key not in self.answers:
            name = f"turn-{len(self.answers)}"
            with time_of(time):  # what other schedules asked before does not change this one's clock
                submit(self.engine, name, name, tokens, params, ephemeral=True)
                self.engine.run()
            self.answers[key] = said(self.engine, name)
        return self.answers[key]


oracle = cache(Oracle)


@pytest.fixture(scope="module", autouse=True)
def stop_oracles() -> Iterator[None]:
    yield
    for kind in KINDS:
        engine = oracle(kind, 2).engine
        assert isinstance(engine, GroupEngine)
        engine.stop()
    oracle.cache_clear()


def predicted(output: list[int], rng: random.Random) -> array[int]:
    """What a client may think that a turn will say: nothing, or most of it, wrong at one place."""
    prediction = array("i", output if rng.random() < 0.5 else [])
    if prediction:
        prediction[rng.randrange(len(prediction))] = rng.choice(WORDS)
    return prediction[rng.randint(0, 2) :]


class Clock:
    """What steps take, at random: whatever they seem to cost, a draft may pay or not, but changes nothing."""

    def __init__(self, seed: int) -> None:
        self._rng, self._now = random.Random(seed), 1.0

    def monotonic(self) -> float:
        self._now += self._rng.choice([0.0, 0.0001, 0.004, 0.005, 0.4])
        return self._now


@contextmanager
def time_of(clock: Any) -> Iterator[None]:
    """Leaders measure their steps with this clock."""
    with ExitStack() as patches:
        for module in (drafts, leader, pace):
            patches.enter_context(mock.patch.object(module, "time", clock))
        yield


def play(seed: int) -> tuple[int, int, int]:
    """One schedule. Returns how many tokens were drafted, how many accepted, and how often a turn was retracted."""
    with time_of(Clock(seed)):
        return _play(random.Random(seed), seed)


def _play(rng: random.Random, seed: int) -> tuple[int, int, int]:
    kind, size = list(KINDS)[seed % len(KINDS)], 1 + (seed // len(KINDS)) % 2
    drafter = NGRAM
    if kind != "window":
        drafter = rng.choice([NGRAM, NGRAM, with_draft_model(kind), with_head(kind, rng)])
    engine = make(
        kind,
        size,
        page_size=rng.choice([1, 4, 16]),
        max_total_tokens=rng.choice([128, 2048]),
        chunked_prefill_size=rng.choice([8, 24, 64]),
        overlap_schedule=rng.random() < 0.5,
        speculative_num_draft_tokens=rng.choice([1, 4, 16]),
        **drafter,
    )
    reference, outputs = oracle(kind, size), {}
    if rng.random() < 0.7:
        if drafter == NGRAM:
            Guesses(engine, outputs, seed)
        else:
            eager(engine.leader)
    if drafter["speculative_algorithm"] in ("EAGLE3", "MTP"):
        Helped(engine, outputs, rng)
    histories: dict[str, list[int]] = {name: [] for name in "abcd"}
    for number in range(rng.randint(3, 6)):
        turns = {}
        for name in rng.sample("abcd", rng.randint(1, 4)):
            history = histories[name][: rng.choice([None, rng.randint(0, 40)])]
            if len(history) > 60:
                history = []
            tokens, params = history + rng.choices(WORDS, k=rng.randint(1, 30)), sampling(rng)
            turn_id = f"{name}{number}"
            turns[name] = turn_id, tokens, params
            outputs[turn_id] = reference.says(tokens, params)[0]
            submit(engine, turn_id, name, tokens, params, prediction=predicted(outputs[turn_id], rng))
            for _ in range(rng.randint(0, 3)):
                engine.leader.step()
        aborted = {name for name in turns if rng.random() < 0.2}
        for name in aborted:
            engine.leader.abort(turns[name][0])
            engine.commands()
        engine.run()
        for name, (turn_id, tokens, params) in turns.items():
            ours, theirs = said(engine, turn_id), reference.says(tokens, params)
            if name in aborted and ours[1] is not None and ours[1].reason == "abort":
                assert ours[0] == theirs[0][: len(ours[0])]
                continue
            assert ours[:2] == theirs[:2], (turn_id, params)
            assert ours[2] == pytest.approx(theirs[2], abs=1e-5)
            histories[name] = tokens + ours[0]
    if isinstance(engine, GroupEngine):
        assert not engine.refused
        engine.stop()
    counters = engine.leader.counters
    drafted, accepted = (
        sum(counters[f"{what}_{name}"] for name in ("ngram", "prediction", "grammar", "model", "head"))
        for what in ("draft_tokens", "accepted_draft_tokens")
    )
    return drafted, accepted, engine.scheduler.num_retracted


def test_random_schedules_say_the_same_with_drafts(long: bool) -> None:
    results = []
    for seed in range(NUM_SCHEDULES_LONG if long else NUM_SCHEDULES):
        try:
            results.append(play(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    drafted, accepted, retracted = (sum(column) for column in zip(*results, strict=True))
    print(f"{len(results)} schedules: {drafted} tokens drafted, {accepted} accepted, {retracted} turns retracted")
    assert 0 < accepted < drafted and retracted > 0
