"""A small model proposes, the large one decides: the same tokens, in fewer steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from holdfast.errors import ConfigError
from tests.parity.checkpoints import make_checkpoint
from tests.workers.engine import SMALL, Engine, eager
from tests.workers.groups import GroupEngine
from tests.workers.test_overlap import KINDS, outcome, play, prompt
from tests.workers.test_speculation import LONG, TIGHT
from workers.config import BUNDLED_MODEL
from workers.scheduling import SamplingParams


def make_draft(folder: Path, num_layers: int) -> Path:
    """The bundled model's first layers, which guess what all of them say."""
    folder.mkdir(exist_ok=True)
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    dropped = tuple(f"model.layers.{i}." for i in range(num_layers, 64))
    tensors = load_file(BUNDLED_MODEL / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith(dropped)}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = make_draft(tmp_path_factory.mktemp("draft"), 3)
    yield {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": folder}


def drafting(engine: Engine) -> Engine:
    eager(engine.leader)
    return engine


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_turns_of_all_kinds_say_the_same_as_without(size: int, overlap: bool, draft: dict[str, Any]) -> None:
    plain = Engine(SMALL, overlap_schedule=False, **TIGHT)
    outputs = play(plain)
    given: dict[str, Any] = {"overlap_schedule": overlap, "speculative_num_draft_tokens": 4, **draft, **TIGHT}
    engine = drafting(Engine(SMALL, **given) if size == 1 else GroupEngine(size, SMALL, **given))
    assert play(engine) == outputs
    assert 0 < engine.leader.counters["accepted_draft_tokens_model"] < engine.leader.counters["draft_tokens_model"]
    for turn_id in outputs:
        *said, logprobs = outcome(plain, turn_id)
        assert (*said, pytest.approx(logprobs, abs=1e-4)) == outcome(engine, turn_id), turn_id
    if isinstance(engine, GroupEngine):
        assert not engine.refused
        engine.stop()


@pytest.mark.parametrize("params", [LONG, SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)])
def test_the_model_itself_as_its_draft_is_always_right(params: SamplingParams) -> None:
    """Its KV is where it should be after every acceptance, prefill in chunks, and a second turn; so is its noise."""
    expected = Engine(SMALL).generate("s", prompt(1, 50), params)
    engine = Engine(
        SMALL,
        chunked_prefill_size=16,
        overlap_schedule=False,
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=BUNDLED_MODEL,
        speculative_num_draft_tokens=5,
    )
    eager(engine.leader)
    assert engine.generate("s", prompt(1, 50), params) == expected
    history = [*prompt(1, 50), *expected, 9, 8, 7]
    again = engine.generate("s", history, params)
    assert again == Engine(SMALL).generate("s", history, params)
    counters = engine.leader.counters
    assert counters["accepted_draft_tokens_model"] == counters["draft_tokens_model"] >= 36
    drafts = engine.last("turn-1").drafts
    assert drafts is not None and drafts.accepted == drafts.proposed


def test_a_draft_model_falls_behind_where_it_does_not_pay_and_catches_up(draft: dict[str, Any]) -> None:
    engine = Engine(SMALL, overlap_schedule=False, chunked_prefill_size=16, **draft)
    speculation: Any = engine.leader.drafts.speculation
    even = 2.0
    speculation.costs.break_even = lambda num_rows, draft_s=0.0: even
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    expected = Engine(SMALL).generate("s", prompt(1, 40), params)
    engine.submit("t", "s", prompt(1, 40), params)
    while len(engine.updates.get("t", ())) < 60:
        engine.leader.step()
    turn = engine.scheduler.turns["t"]
    assert engine.leader.counters["draft_tokens_model"] == 0 and speculation._turns[turn].computed_len is None
    even = 0.05  # a probe will find out
    engine.run()
    assert engine.output("t") == expected
    assert engine.leader.counters["accepted_draft_tokens_model"] > 20


def test_drafts_use_no_page_of_their_own(draft: dict[str, Any]) -> None:
    plain, engine = Engine(SMALL, page_size=4), drafting(Engine(SMALL, page_size=4, overlap_schedule=False, **draft))
    for each in (plain, engine):
        each.generate("s", prompt(3, 30), LONG)
    ours, theirs = engine.cache.slots["s"], plain.cache.slots["s"]
    assert [len(t.pages) for t in ours.tables] == [len(t.pages) for t in theirs.tables]
    assert ours.committed_len == ours.allocated_len == theirs.committed_len
    assert sum(engine.leader.rank.kv.page_bytes) > sum(plain.leader.rank.kv.page_bytes)


def test_a_draft_model_that_does_not_fit_is_refused(tmp_path: Path, draft: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is for speculative_algorithm STANDALONE and EAGLE3"):
        Engine(SMALL, **draft | {"speculative_algorithm": "NGRAM"})
    with pytest.raises(ConfigError, match="STANDALONE needs a checkpoint"):
        Engine(SMALL, speculative_algorithm="STANDALONE")
    make_checkpoint("llama", tmp_path / "other", vocab_size=512)
    with pytest.raises(ConfigError, match="a vocabulary of 512 tokens"):
        Engine(SMALL, **draft | {"speculative_draft_model_path": tmp_path / "other"})
    make_checkpoint("mistral-window", tmp_path / "window", vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, tmp_path / "window" / name)
    with pytest.raises(ConfigError, match="sliding windows"):
        Engine(SMALL, model=tmp_path / "window", **draft)


def test_kinds_of_turns_are_all_drafted_for(draft: dict[str, Any]) -> None:
    """Or else the comparison above compared nothing."""
    engine = drafting(Engine(SMALL, overlap_schedule=False, **draft))
    for i, params in enumerate(KINDS[:5]):
        engine.submit(f"t{i}", f"s{i}", prompt(i, 12), params)
    engine.run()
    drafted = [engine.last(f"t{i}").drafts for i in range(4)]
    assert all(each is not None and each.proposed > 0 for each in drafted)
