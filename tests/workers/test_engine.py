"""The engine on the bundled model: the tokens do not depend on how they are computed."""

from __future__ import annotations

import time
import zlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from holdfast.errors import InvalidRequest, PromptTooLong, QueueFull, SessionBusy, StaleEpoch
from holdfast.wire import LAST_EPOCH
from tests.workers.engine import NO_EOS, Engine
from workers.config import BUNDLED_MODEL
from workers.engine import epochs
from workers.kv.slot import new_tokens
from workers.scheduling import Finish, SamplingParams

SAMPLED = replace(NO_EOS, temperature=0.8, top_k=40, top_p=0.95, seed=5)
PROMPTS = {f"p{i}": [(7 * i + 13 * j) % 1500 + 10 for j in range(5 + 23 * i)] for i in range(6)}


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """Each prompt's output, computed alone and in one piece."""
    engine = Engine(chunked_prefill_size=1024)
    return {name: engine.generate(name, prompt, SAMPLED) for name, prompt in PROMPTS.items()}


def test_greedy_equals_transformers() -> None:
    reference = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    prompt = PROMPTS["p3"]
    out = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert Engine().generate("s", prompt) == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("chunk", [9, 33, 512])
def test_batched_and_chunked_equals_alone(alone: dict[str, list[int]], page_size: int, chunk: int) -> None:
    engine = Engine(page_size=page_size, chunked_prefill_size=chunk)
    for name, prompt in PROMPTS.items():
        engine.submit(name, name, prompt, SAMPLED)
    engine.run()
    assert {name: engine.output(name) for name in PROMPTS} == alone


def test_retracted_turns_return_with_the_same_tokens(alone: dict[str, list[int]]) -> None:
    # Room for the longest prompt and little more: turns are retracted over and over.
    engine = Engine(page_size=4, max_total_tokens=180)
    for name, prompt in PROMPTS.items():
        engine.submit(name, name, prompt, SAMPLED)
    engine.run()
    assert engine.scheduler.num_retracted > 0
    assert {name: engine.output(name) for name in PROMPTS} == alone


def test_freed_pages_are_zeroed_and_nothing_else_is(alone: dict[str, list[int]]) -> None:
    engine = Engine(page_size=4, max_total_tokens=180, zero_freed_pages=True)
    for again in (1, 2):
        for name, prompt in PROMPTS.items():
            engine.submit(f"{name}, {again}", f"{name}, {again}", prompt, SAMPLED)
        engine.run()
        assert {name: engine.output(f"{name}, {again}") for name in PROMPTS} == alone
        for name in PROMPTS:
            engine.leader.release_session(f"{name}, {again}", 1)
        engine.commands()
        engine.leader.step()
        kv, (group,) = engine.leader.rank.kv, engine.cache.groups
        engine.leader.rank.stream.run(lambda: None).result()
        assert group.pool.num_free == group.pool.num_pages
        assert not any(part[: group.pool.num_pages].any() for part in kv._parts[0])
    assert engine.scheduler.num_retracted > 0


@pytest.mark.parametrize("seen", [1, 5, 11])
def test_a_replay_elsewhere_continues_identically(alone: dict[str, list[int]], seen: int) -> None:
    prompt, output = PROMPTS["p2"], alone["p2"]
    for params in (SAMPLED, replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.5)):
        whole = Engine().generate("s", prompt, params)
        engine = Engine()
        engine.submit("t", "s", prompt + whole[:seen], params, prompt_len=len(prompt))
        engine.run()
        assert engine.output("t") == whole[seen:]
    assert len(output) == 12


def test_turn_n_costs_only_its_new_tokens() -> None:
    engine, history = Engine(), []
    for turn in range(6):
        prompt = [*history, *([50 + turn] * 10)]
        crc = zlib.crc32(new_tokens(history))
        computed = engine.leader.counters["computed_tokens"]
        engine.submit(
            f"t{turn}", "s", prompt[len(history) :], prompt_len=len(prompt), prefix_len=len(history), prefix_crc=crc
        )
        engine.run()
        assert engine.cached(f"t{turn}") == max(0, len(history) - 1)
        # 10 of input, 11 fed back, and the last token of the turn before.
        assert engine.leader.counters["computed_tokens"] - computed == 21 + (turn > 0)
        history = prompt + engine.output(f"t{turn}")


def test_a_missing_prefix_is_requested() -> None:
    engine = Engine()
    engine.submit("t", "s", [1], prompt_len=11, prefix_len=10, prefix_crc=1)
    assert engine.last("t").needs_history
    engine.generate("s", list(range(20, 30)))
    wrong = zlib.crc32(new_tokens(range(30, 40)))
    engine.submit("t2", "s", [1], prompt_len=11, prefix_len=10, prefix_crc=wrong)
    assert engine.last("t2").needs_history, "same length, other tokens"


def test_abort_rolls_back_and_the_next_turn_proves_it() -> None:
    engine = Engine()
    first = list(range(20, 40))
    history = first + engine.generate("s", first)
    engine.submit("doomed", "s", [*history, 7, 8, 9], replace(NO_EOS, max_tokens=500))
    for _ in range(5):
        engine.leader.step()
    engine.leader.abort("doomed")
    engine.commands()
    assert engine.last("doomed").finish == Finish("abort")
    assert not engine.scheduler.turns
    engine.submit("next", "s", [*history, 3])
    engine.run()
    assert engine.cached("next") == len(history)
    assert engine.output("next") == Engine().generate("s", [*history, 3])


def test_sessions_and_requests_share_a_prefix() -> None:
    engine, system = Engine(), list(range(100, 164))
    engine.generate("a", [*system, 1])
    engine.submit("plain", "turn-x", [*system, 2], ephemeral=True)
    engine.submit("b", "b", [*system, 3])
    engine.run()
    assert engine.cached("plain") == engine.cached("b") == 64
    assert "turn-x" not in engine.cache.slots


def test_release_frees_at_any_moment() -> None:
    engine = Engine()
    engine.submit("t", "s", list(range(20, 60)))
    engine.leader.step()
    freed = engine.leader.release_session("s", 1)
    engine.commands()
    engine.leader.step()
    assert freed.result(1).ranks[0].pages_freed > 0 and engine.last("t").finish == Finish("abort", "released")
    assert engine.cache.groups[0].pool.num_free == engine.cache.groups[0].pool.num_pages
    engine.submit("t2", "s", list(range(20, 60)))
    later = engine.leader.release_session("s", 1, after_turn=True)
    engine.commands()
    assert not later.done()
    engine.run()
    assert later.result(1).ranks[0].pages_freed > 0 and len(engine.output("t2")) == 12


def test_stale_epoch_is_refused_and_newer_one_takes_over() -> None:
    engine = Engine()
    engine.submit("old", "s", [5] * 8, replace(NO_EOS, max_tokens=400), epoch=3)
    engine.leader.step()
    engine.submit("stale", "s", [5] * 8, epoch=2)
    assert isinstance(engine.last("stale").error, StaleEpoch)
    engine.submit("same", "s", [5] * 8, epoch=3)
    assert isinstance(engine.last("same").error, SessionBusy)
    engine.submit("new", "s", [5] * 8, epoch=4)
    assert engine.last("old").finish == Finish("abort", "superseded")
    engine.run()
    assert len(engine.output("new")) == 12
    cut = engine.leader.free_tail("s", 3, 0)
    engine.commands()
    assert isinstance(cut.exception(1), StaleEpoch)


@pytest.mark.parametrize("moved", [True, False])
def test_what_arrives_after_its_sessions_release_is_refused(moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was sent before, on a connection that was cut. A slot for it would never be freed."""
    engine = Engine()
    engine.submit("first", "s", [5] * 8, epoch=2)
    engine.run()
    engine.leader.release_session("s", 3, moved=moved)
    engine.submit("late", "s", [5] * 8, epoch=2)
    assert isinstance(engine.last("late").error, StaleEpoch) and "s" not in engine.cache.slots
    # Much later the id may be a new session's.
    now = time.monotonic()
    monkeypatch.setattr(epochs, "time", SimpleNamespace(monotonic=lambda: now + epochs.RELEASED_S + 1))
    engine.submit("new", "s", [5] * 8, epoch=1)
    engine.run()
    assert len(engine.output("new")) == 12


def test_a_session_that_the_journal_does_not_know_may_begin_again_at_once() -> None:
    engine = Engine()
    engine.submit("first", "s", [5] * 8, epoch=2)
    engine.run()
    engine.leader.release_session("s", LAST_EPOCH)
    engine.submit("new", "s", [5] * 8, epoch=1)
    engine.run()
    assert len(engine.output("new")) == 12


def test_bad_input_is_refused_and_disturbs_nothing() -> None:
    engine = Engine(max_running_requests=1, max_queued_requests=1)
    before = engine.cache.audit()
    engine.submit("long", "s", [5] * 4096)
    assert isinstance(engine.last("long").error, PromptTooLong)
    for bad in ([], [-1], [10**6]):
        engine.submit(f"bad{bad}", "s", bad)
        assert isinstance(engine.last(f"bad{bad}").error, InvalidRequest)
    assert engine.cache.audit() == before
    for i in range(2):
        engine.submit(f"ok{i}", f"s{i}", [5, 6])
        engine.leader.step()
    engine.submit("over", "s3", [5, 6])
    assert isinstance(engine.last("over").error, QueueFull)
    engine.run()


def test_output_stops_at_the_context_length() -> None:
    engine = Engine(context_length=40)
    engine.submit("t", "s", [5] * 30, SamplingParams(max_tokens=100, ignore_eos=True))
    engine.run()
    assert len(engine.output("t")) == 10 and engine.last("t").finish == Finish("length")


def test_stop_conditions() -> None:
    free = Engine().generate("s", PROMPTS["p1"], replace(SAMPLED, max_tokens=30))
    engine = Engine()
    stop_at = next(i for i in range(5, 30) if free[i] not in free[:i])
    by_id = replace(SAMPLED, max_tokens=30, stop_token_ids=frozenset({free[stop_at]}))
    assert engine.generate("a", PROMPTS["p1"], by_id) == free[: stop_at + 1]
    assert engine.generate("b", PROMPTS["p1"], replace(by_id, min_tokens=20))[: stop_at + 1] != free[: stop_at + 1]
    decoded = engine.generate("c", PROMPTS["p1"], replace(SAMPLED, max_tokens=30, stop=("nowhere in it",)))
    assert decoded == free


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = Engine(chunked_prefill_size=32)
    engine.submit("long", "a", [9] * 900)
    engine.leader.step()
    engine.submit("short", "b", [8] * 10)
    for _ in range(3):
        engine.leader.step()
    assert engine.updates.get("short") and not engine.updates.get("long")
    engine.run()


def test_idle_sessions_give_way_least_recently_used_first() -> None:
    engine = Engine(page_size=4, max_total_tokens=200)
    for name in ("old", "mid", "new"):
        engine.generate(name, [ord(name[0])] * 40)
    engine.generate("big", [99] * 60)
    assert "old" not in engine.cache.slots and "new" in engine.cache.slots
    assert engine.cache.audit().ok
