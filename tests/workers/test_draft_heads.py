"""Heads draft what a plain reading of their papers drafts, wherever their rows were computed, and change no token."""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from holdfast.errors import ConfigError, UnsupportedModel
from tests.parity.heads import Head, make_eagle3, make_mtp
from tests.workers.engine import SMALL, Engine, eager
from tests.workers.groups import GroupEngine
from tests.workers.test_overlap import outcome, play, prompt
from tests.workers.test_speculation import TIGHT
from workers.config import BUNDLED_MODEL
from workers.engine.draft_head import KeptStates
from workers.engine.penalties import PenaltyCounts
from workers.scheduling import SamplingParams
from workers.scheduling.model_speculation import MAX_HEAD_LAG, DraftJob

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=200)
KERNELS, KINDS = ["torch_native", "cpu"], ["MTP", "EAGLE3", "EAGLE3 of layers"]


def make(kind: str, folder: Path) -> tuple[Head, dict[str, Any]]:
    """A head, and the settings of an engine that has it."""
    if kind == "MTP":
        head: Head = make_mtp(folder / "target")
        return head, {"model": folder / "target", "speculative_algorithm": "MTP"}
    layers = [0, 3, 1] if kind == "EAGLE3 of layers" else None
    head = make_eagle3(folder / "head", "llama", folder / "target", layers=layers)
    config = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": folder / "head"}
    return head, config | {"model": folder / "target"}


class Watched:
    """Compares every draft of an engine with the head's reference, and has some of them begin right."""

    def __init__(self, engine: Engine, head: Head, outputs: dict[str, list[int]]) -> None:
        self.num_drafts, self._head, self._outputs = 0, head, outputs
        drafter, speculation = engine.leader.rank._drafter, engine.leader.drafts.speculation
        assert drafter is not None and speculation is not None
        self._propose = drafter.propose
        drafter.propose = self.propose  # type: ignore[method-assign]
        speculation.costs.break_even = lambda num_rows, draft_s=0.0: -1.0  # type: ignore[method-assign]

    def propose(self, jobs: Sequence[DraftJob], counts: PenaltyCounts) -> tuple[dict[str, array[int]], int]:
        drafts, num_runs = self._propose(jobs, counts)
        for job in jobs:
            turn, draft = job.turn, drafts.get(job.turn.turn_id)
            if draft is not None:
                assert list(draft) == self._head.draft(list(turn.tokens), len(draft)), (
                    f"after {len(turn.tokens)} tokens"
                )
                self.num_drafts += 1
                right = self._outputs[turn.turn_id][turn.num_output :][: min(len(draft), self.num_drafts % 4)]
                draft[: len(right)] = array("i", right)
        return drafts, num_runs


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_as_its_paper_says(kind: str, kernels: str, tmp_path: Path) -> None:
    """Through prefills in chunks, batches, accepted and rejected drafts, and the overlapped loop."""
    head, config = make(kind, tmp_path)
    common: dict[str, Any] = {"attention_backend": kernels, "chunked_prefill_size": 24, "page_size": 4}
    plain = Engine(SMALL, model=config["model"], **common)
    prompts = {f"t{i}": prompt(i, 1 + 20 * i) for i in range(3)}
    outputs = {turn_id: plain.generate(turn_id, tokens, GREEDY) for turn_id, tokens in prompts.items()}
    for overlap in (False, True):
        engine = Engine(SMALL, overlap_schedule=overlap, speculative_num_draft_tokens=3, **config, **common)
        watched = Watched(engine, head, outputs)
        for turn_id, tokens in prompts.items():
            engine.submit(turn_id, turn_id, tokens, GREEDY)
        engine.run()
        assert {turn_id: engine.output(turn_id) for turn_id in prompts} == outputs
        assert watched.num_drafts > 20
        assert 0 < engine.leader.counters["accepted_draft_tokens_head"] < engine.leader.counters["draft_tokens_head"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_follows_in_pieces_where_it_does_not_pay(kind: str, tmp_path: Path) -> None:
    """And is right when it pays again: no position of a turn is without its state."""
    head, config = make(kind, tmp_path)
    output = Engine(SMALL, model=config["model"]).generate("t", prompt(1, 50), LONG)
    for overlap in (False, True):
        engine = Engine(SMALL, overlap_schedule=overlap, chunked_prefill_size=24, **config)
        watched = Watched(engine, head, {"t": output})
        speculation: Any = engine.leader.drafts.speculation
        speculation.costs.break_even, speculation._since_draft = lambda num_rows, draft_s=0.0: 2.0, -(10**6)
        engine.submit("t", "t", prompt(1, 50), LONG)
        while len(engine.updates.get("t", ())) < 2 * MAX_HEAD_LAG + 10:
            engine.leader.step()
        assert engine.leader.counters["draft_tokens_head"] == 0
        turn = engine.scheduler.turns["t"]
        assert 0 < len(turn.tokens) - speculation._turns[turn].computed_len <= MAX_HEAD_LAG + 1
        speculation.costs.break_even = lambda num_rows, draft_s=0.0: -1.0
        speculation._since_draft = 10**6
        engine.run()
        assert engine.output("t") == output and watched.num_drafts > 5


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["MTP", "EAGLE3"])
def test_turns_of_all_kinds_say_the_same_as_without(kind: str, size: int, overlap: bool, tmp_path: Path) -> None:
    """With retracted turns, second turns, and in a group."""
    _, config = make(kind, tmp_path)
    plain = Engine(SMALL, model=config["model"], overlap_schedule=False, **TIGHT)
    outputs = play(plain)
    changes: dict[str, Any] = {"overlap_schedule": overlap, "speculative_num_draft_tokens": 4, **config, **TIGHT}
    engine = Engine(SMALL, **changes) if size == 1 else GroupEngine(size, SMALL, **changes)
    eager(engine.leader)
    assert play(engine) == outputs
    assert engine.scheduler.num_retracted > 0 and engine.leader.counters["draft_tokens_head"] > 0
    for turn_id in outputs:
        *said, logprobs = outcome(plain, turn_id)
        assert (*said, pytest.approx(logprobs, abs=1e-4)) == outcome(engine, turn_id), turn_id
    if isinstance(engine, GroupEngine):
        assert not engine.refused
        engine.stop()


def test_a_head_that_is_right_by_construction_is_always_accepted(tmp_path: Path) -> None:
    """Of a model whose layers add nothing: a token's successor depends on the token alone, and the head reads that."""
    make_mtp(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith(("enorm.weight", "shared_head.norm.weight", "model.norm.weight")):
            tensor.fill_(1.0)
        elif name.endswith("eh_proj.weight"):
            size = len(tensor)
            tensor[:, :size], tensor[:, size:] = torch.eye(size), 0.0
    save_file(tensors, path)
    sampled = replace(GREEDY, temperature=0.8, seed=3)
    for params in (GREEDY, sampled):
        engine = Engine(SMALL, model=tmp_path, speculative_algorithm="MTP", overlap_schedule=False)
        eager(engine.leader)
        assert engine.generate("s", prompt(1, 40), params) == Engine(SMALL, model=tmp_path).generate(
            "s", prompt(1, 40), params
        )
        counters = engine.leader.counters
        assert counters["accepted_draft_tokens_head"] == counters["draft_tokens_head"] > 15


@given(st.data())
def test_kept_states_are_a_turns_own_and_its_latest(data: st.DataObject) -> None:
    """Against a dictionary of which turn and position was written to a row last."""
    num_rows = data.draw(st.integers(4, 20))
    kept, rows = KeptStates(num_rows), {}
    latest: dict[tuple[str, int], int] = {}
    for version in range(data.draw(st.integers(1, 12))):
        pieces, left = [], num_rows
        for turn_id in data.draw(st.lists(st.sampled_from("abc"), unique=True, min_size=1)):
            start, count = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 5))
            if count <= left:
                pieces.append((turn_id, start, start + count))
                left -= count
        row = kept.add(pieces) if pieces else 0
        for turn_id, start, end in pieces:
            for position in range(start, end):
                rows[row] = latest[turn_id, position] = (turn_id, position, version)
                row += 1
        assert row <= num_rows
        for turn_id in "abc":
            for position, at in enumerate(kept.rows(turn_id, 0, 12)):
                if at < num_rows:
                    assert rows[at] == latest[turn_id, position]
    for turn_id, start, end in pieces:
        assert num_rows not in kept.rows(turn_id, start, end), "what was added last is there"


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    _, config = make("EAGLE3", tmp_path)
    head = config["speculative_draft_model_path"]
    with pytest.raises(ConfigError, match="EAGLE3 needs a checkpoint"):
        Engine(SMALL, **config | {"speculative_draft_model_path": None})
    with pytest.raises(UnsupportedModel, match="num_nextn_predict_layers"):
        Engine(SMALL, **config | {"speculative_algorithm": "MTP", "speculative_draft_model_path": None})
    with pytest.raises(UnsupportedModel, match="the head is for states of 48 elements"):
        Engine(SMALL, **config | {"model": BUNDLED_MODEL})
    with pytest.raises(UnsupportedModel, match="architectures: LlamaForCausalLM is not supported"):
        Engine(SMALL, **config | {"speculative_draft_model_path": config["model"]})
    for change, message in (
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "eagle_aux_hidden_state_layer_ids"),
        ({"vocab_size": 999}, "a model with 999 tokens"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"draft_vocab_size": 301}, "has shape"),
    ):
        other = tmp_path / "other"
        shutil.copytree(head, other, dirs_exist_ok=True)
        (other / "config.json").write_text(json.dumps(json.loads((head / "config.json").read_text()) | change))
        with pytest.raises(UnsupportedModel, match=message):
            Engine(SMALL, **config | {"speculative_draft_model_path": other})
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"strange": torch.ones(1)}, other / "model.safetensors")
    shutil.copy(head / "config.json", other / "config.json")
    with pytest.raises(UnsupportedModel, match="strange"):
        Engine(SMALL, **config | {"speculative_draft_model_path": other})
