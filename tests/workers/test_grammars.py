"""Turns with grammars in one engine, step by step: what waits, what ends, and what does not change."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.schemas import corpus
from holdfast.errors import InvalidRequest, NoWorkerAvailable
from tests.schemas import check
from tests.workers.engine import SMALL, Engine
from tests.workers.groups import GroupEngine
from workers.config import BUNDLED_MODEL
from workers.grammar.compiler import GrammarCompiler
from workers.scheduling import Grammar, SamplingParams

COMPILER = GrammarCompiler(BUNDLED_MODEL / "tokenizer.json", 2048, (4, 0))


def params(kind: str, text: Any, seed: int = 0, **more: Any) -> SamplingParams:
    grammar = Grammar(kind, text if isinstance(text, str) else json.dumps(text), "field")
    given = {"max_tokens": 1500, "temperature": 1.0, "seed": seed} | more
    return SamplingParams(grammar=grammar, **given)


def prompt(seed: int, length: int = 12) -> list[int]:
    return [5 + (seed * 131 + i * 17) % 2000 for i in range(length)]


def text_of(engine: Engine, turn_id: str) -> str:
    return COMPILER.tokenizer.decode_str([t for t in engine.output(turn_id) if t not in (4, 0)])


def submit(engine: Engine, turn_id: str, session: str, tokens: list[int], given: SamplingParams, **more: Any) -> None:
    """Submit a turn whose grammar is compiled already."""
    assert given.grammar is not None
    engine.leader._outputs.grammars.compile(given.grammar).exception(timeout=60)
    engine.submit(turn_id, session, tokens, given, **more)


class Slowly:
    """In place of the compiler: each grammar is done when the test says so."""

    def __init__(self, engine: Engine) -> None:
        self.future: Future[Any] = Future()
        engine.leader._outputs.grammars.compile = lambda grammar: self.future  # type: ignore[method-assign]

    def finish(self, grammar: Grammar) -> None:
        self.future.set_result(COMPILER.compile(grammar))


TIGHT = {"max_total_tokens": 360, "chunked_prefill_size": 24, "page_size": 4, "context_length": 350}


@pytest.mark.parametrize("size", [1, 2])
def test_texts_under_chunking_and_retract_equal_those_alone(size: int) -> None:
    schemas = [s for s in corpus(40) if len(json.dumps(s)) < 500][:6]
    alone, tight = Engine(), Engine(SMALL, **TIGHT) if size == 1 else GroupEngine(size, SMALL, **TIGHT)
    for i, schema in enumerate(schemas):
        submit(alone, f"t{i}", f"s{i}", prompt(i, 40), params("json_schema", schema, i, max_tokens=300))
        alone.run()
        submit(tight, f"t{i}", f"s{i}", prompt(i, 40), params("json_schema", schema, i, max_tokens=300))
    tight.run()
    assert tight.scheduler.num_retracted > 0, "pages ran out"
    num_ended = 0
    for i, schema in enumerate(schemas):
        assert alone.output(f"t{i}") == tight.output(f"t{i}")
        if alone.last(f"t{i}").finish == ("stop", 4):
            check(text_of(alone, f"t{i}"), schema)
            num_ended += 1
    assert num_ended >= 3
    if isinstance(tight, GroupEngine):
        tight.stop()


@pytest.mark.parametrize("shown", [1, 5, 17])
def test_a_replay_continues_the_grammar(shown: int) -> None:
    whole, replay = Engine(), Engine()
    given = params("regex", r"(\d\d[a-f]{3}){12}", 3)
    submit(whole, "t", "s", prompt(1), given)
    whole.run()
    output = whole.output("t")
    submit(replay, "t", "s", prompt(1) + output[:shown], given, prompt_len=len(prompt(1)))
    replay.run()
    assert output[:shown] + replay.output("t") == output
    assert re.fullmatch(r"(\d\d[a-f]{3}){12}", text_of(whole, "t"))


def test_a_replay_of_all_of_a_text_has_only_its_end_to_say() -> None:
    whole, replay = Engine(), Engine()
    submit(whole, "t", "s", prompt(1), params("regex", "[ab]{3}"))
    whole.run()
    submit(replay, "t", "s", prompt(1) + whole.output("t"), params("regex", "[ab]{3}"), prompt_len=len(prompt(1)))
    assert replay.last("t").finish == ("stop", 4) and not replay.output("t")


def test_others_run_while_a_grammar_is_compiled() -> None:
    engine = Engine()
    slowly = Slowly(engine)
    given = params("regex", "[ab]{3}")
    engine.submit("waits", "w", prompt(1), given)
    engine.submit("runs", "r", prompt(2))
    engine.run()
    assert engine.last("runs").finish is not None and "waits" not in engine.updates
    assert given.grammar is not None
    slowly.finish(given.grammar)
    engine.commands()
    engine.run()
    assert re.fullmatch("[ab]{3}", text_of(engine, "waits"))


def test_a_turn_that_waits_for_its_grammar_can_be_ended() -> None:
    engine = Engine(grammar_timeout_s=1000.0)
    given = params("regex", "[ab]{3}")
    slowly = Slowly(engine)
    for turn_id in ("aborted", "released", "preempted"):
        engine.submit(turn_id, f"session of {turn_id}", prompt(1), given)
    engine.leader.abort("aborted")
    engine.leader.release_session("session of released", 1)
    engine.commands()
    engine.leader.end_all(NoWorkerAvailable("drains"))
    engine.commands()
    assert given.grammar is not None
    slowly.finish(given.grammar)
    engine.commands()
    engine.leader.step()
    assert [engine.last(t).finish for t in ("aborted", "released")] == [("abort", None), ("abort", "released")]
    assert isinstance(engine.last("preempted").error, NoWorkerAvailable)
    assert not engine.scheduler.turns and not engine.cache.slots


def test_a_release_under_an_earlier_epoch_spares_a_turn_that_waits() -> None:
    engine = Engine(grammar_timeout_s=1000.0)
    given = params("regex", "[ab]{3}")
    engine.generate("s", prompt(1))
    slowly = Slowly(engine)
    engine.submit("waits", "s", prompt(1), given, epoch=2)
    released = engine.leader.release_session("s", 1)  # a sweep, which read the journal before the session came back
    engine.commands()
    engine.leader.step()
    assert released.result(timeout=10) is not None and "s" not in engine.cache.slots
    assert given.grammar is not None
    slowly.finish(given.grammar)
    engine.commands()
    engine.run()
    assert re.fullmatch("[ab]{3}", text_of(engine, "waits"))


def test_masks_are_computed_beside_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(overlap_schedule=False)
    rank, outputs, masks = engine.leader.rank, engine.leader._outputs, list[Future[Any]]()
    launch, masks_of = rank.launch, outputs.masks

    def keep(work: Any) -> Future[Any] | None:
        future = masks_of(work)
        masks.extend([future] if future is not None else [])
        return future

    def launch_later(batch: Any, num_copies: int) -> None:
        masks.pop().result(timeout=60)  # none yet: IndexError
        launch(batch, num_copies)

    monkeypatch.setattr(outputs, "masks", keep)
    monkeypatch.setattr(rank, "launch", launch_later)
    submit(engine, "t", "s", prompt(1), params("regex", "[a-c]{3}"))
    engine.run()
    assert re.fullmatch("[a-c]{3}", text_of(engine, "t"))


def test_a_grammar_has_a_deadline() -> None:
    engine = Engine(grammar_timeout_s=0.0)
    Slowly(engine)
    engine.submit("t", "s", prompt(1), params("regex", "[ab]{3}"))
    engine.leader.step()
    error = engine.last("t").error
    assert isinstance(error, InvalidRequest) and error.param == "field" and "not compiled within" in error.message


def test_an_invalid_grammar_disturbs_nobody() -> None:
    engine = Engine()
    engine.submit("runs", "r", prompt(2))
    submit(engine, "invalid", "s", prompt(1), params("regex", "("))
    engine.run()
    assert isinstance(engine.last("invalid").error, InvalidRequest)
    assert engine.last("runs").finish is not None and "s" not in engine.cache.slots


def test_compiled_grammars_are_shared_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.grammar.turns.MAX_CACHED", 2)
    grammars = Engine().leader._outputs.grammars
    first = Grammar("regex", "a", "field")
    assert grammars.compile(first) is grammars.compile(Grammar("regex", "a", "field"))
    for text in "bcd":
        grammars.compile(Grammar("regex", text, "field"))
    assert len(grammars._compiled) == 2
    grammars.close()


def test_an_engine_without_the_library_serves_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = Engine()
    engine.submit("runs", "r", prompt(2))
    submit(engine, "refused", "s", prompt(1), params("regex", "a"))
    engine.run()
    error = engine.last("refused").error
    assert isinstance(error, InvalidRequest) and "has no llguidance" in error.message
    assert engine.last("runs").finish is not None


STOPPING = SamplingParams(max_tokens=60, temperature=1.0, seed=5, ignore_eos=True)


def stopped_by(engine: Engine, patterns: tuple[str, ...], **given: Any) -> tuple[str, Any]:
    turn_id = f"stopped-{len(engine.updates)}"
    chosen = replace(STOPPING, stop_regexes=patterns, **given)
    engine.leader._outputs.compile(chosen).exception(timeout=60)  # type: ignore[union-attr]
    engine.submit(turn_id, turn_id, prompt(1), chosen)
    engine.run()
    return text_of(engine, turn_id), engine.last(turn_id).finish


def test_a_pattern_ends_the_output_at_its_first_match() -> None:
    engine = Engine()
    engine.submit("free", "free", prompt(1), STOPPING)
    engine.run()
    free = text_of(engine, "free")
    found = re.search("[a-z]{4} ", free)
    assert found is not None and found.end() < len(free) - 20
    text, finish = stopped_by(engine, ("qqqq", "[a-z]{4} "))
    assert finish == ("stop", "[a-z]{4} ") and free.startswith(text)
    assert re.search("[a-z]{4} ", text) and not re.search("[a-z]{4} ", text[: found.end() - 1])
    late, finish = stopped_by(engine, ("[a-z]{4} ",), min_tokens=30)
    assert len(late) > len(text) and free.startswith(late) and finish == ("stop", "[a-z]{4} ")
    assert stopped_by(engine, ("qqqq",)) == (free, ("length", None))


def test_a_replay_continues_the_search_for_a_pattern() -> None:
    engine = Engine()
    text, _ = stopped_by(engine, ("[a-z]{4} ",))
    output = engine.output("stopped-0")
    for shown in range(1, len(output) + 1):
        chosen = replace(STOPPING, stop_regexes=("[a-z]{4} ",))
        turn_id = f"replay-{shown}"
        engine.submit(turn_id, turn_id, prompt(1) + output[:shown], chosen, prompt_len=len(prompt(1)))
        engine.leader._outputs.compile(chosen).exception(timeout=60)  # type: ignore[union-attr]
        engine.commands()
        engine.run()
        assert output[:shown] + (engine.output(turn_id) if shown < len(output) else []) == output
        assert engine.last(turn_id).finish == ("stop", "[a-z]{4} ")
    assert text


@pytest.mark.parametrize("pattern", ["a(", "^a", r"\bword", "(?=a)b"])
def test_a_pattern_that_cannot_be_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="stop_regex") as refused:
        COMPILER.compile_stops((pattern,))
    assert refused.value.param == "stop_regex"


def test_a_pattern_that_becomes_too_complex_ends_its_turn_alone() -> None:
    engine = Engine()
    engine.submit("neighbour", "n", prompt(2))
    _, finish = stopped_by(engine, (r"([\s\S]{999}){999}",), max_tokens=1500)
    error = engine.last("stopped-0").error
    assert finish is None and isinstance(error, InvalidRequest) and error.param == "stop_regex"
    assert engine.last("neighbour").finish == ("length", None)
