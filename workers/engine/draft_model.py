"""What computes drafts: a small model, or a head of the model's own. Its KV lies in the model's pages."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from holdfast.errors import ConfigError
from workers.config import EngineConfig
from workers.engine.batch import Batch
from workers.engine.choice import restrictions
from workers.engine.memory import host_group
from workers.engine.paged_model import PagedModel
from workers.engine.penalties import PenaltyCounts
from workers.engine.sampler import Places, sample
from workers.kernels.backend import Backend
from workers.models import Decoder, Hidden, KVPool, ModelConfig, read_config
from workers.models.heads import EAGLE3, MTP, HeadConfig, eagle3_config, mtp_config
from workers.scheduling import Work
from workers.scheduling.model_speculation import DraftJob

STANDALONE = "STANDALONE"
WITH_CHECKPOINT = (STANDALONE, EAGLE3)
"""Algorithms whose drafts a checkpoint of its own computes."""


def read_draft_config(config: EngineConfig, target: ModelConfig) -> ModelConfig | HeadConfig | None:
    """What computes drafts, if anything does. Raises ConfigError if it does not fit the model that it drafts for."""
    algorithm, path = config.speculative_algorithm, config.speculative_draft_model_path
    if path is not None and algorithm not in WITH_CHECKPOINT:
        raise ConfigError(f"speculative_draft_model_path: is for speculative_algorithm {' and '.join(WITH_CHECKPOINT)}")
    if algorithm not in (*WITH_CHECKPOINT, MTP):
        return None
    if host_group(target) < 0:
        raise ConfigError(f"speculative_algorithm: {algorithm} is not for a model that has sliding windows alone")
    if algorithm == MTP:
        return mtp_config(target)
    if path is None:
        raise ConfigError(f"speculative_draft_model_path: {algorithm} needs a checkpoint")
    if algorithm == EAGLE3:
        return eagle3_config(path, target)
    draft = read_config(path)
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative_draft_model_path: a vocabulary of {draft.vocab_size} tokens, and the model's has "
            f"{target.vocab_size}; they must be the same"
        )
    return draft


class Drafter(Protocol):
    """Computes drafts on a rank, for the thread that owns its device."""

    taps: Sequence[int]
    """States of the model that it needs: see ``Decoder.hidden``."""

    def propose(self, jobs: Sequence[DraftJob], counts: PenaltyCounts) -> tuple[dict[str, array[int]], int]:
        """The jobs' drafts by turn id, and in how many runs. A token is chosen as the turn's own would be."""

    def keep(self, work: Sequence[Work], hidden: Hidden) -> None:
        """The model has computed a step."""


class DraftModel:
    """Runs a draft model for one rank. Its KV has the pages of a group that keeps every token, whatever its own layers
    attend to: no page table, no length and no page is its own, so none can leak or differ.
    """

    taps: Sequence[int] = ()
    distance = 0
    """How many positions before a token its KV lies."""

    def __init__(self, decoder: Decoder, backend: Backend, kv: KVPool, table: Tensor) -> None:
        """``kv``: with as many pages as the group whose page ``table`` it is. ``backend``: the decoder's own."""
        tables = [table] * len(decoder.config.kv_groups)
        self._model = PagedModel(decoder, backend, kv, tables, lambda chosen: chosen)
        self._sampling = backend.sampling

    def keep(self, work: Sequence[Work], hidden: Hidden) -> None:
        """See ``Drafter``. It needs nothing."""

    @torch.inference_mode()
    def propose(self, jobs: Sequence[DraftJob], counts: PenaltyCounts) -> tuple[dict[str, array[int]], int]:
        """See ``Drafter``."""
        drafts = {job.turn.turn_id: array("i") for job in jobs if job.num_draft}
        jobs = [job for job in jobs if self._start(job) < job.end]
        batch = Batch()
        for job in jobs:
            start = self._start(job)
            self._add(batch, job, start, job.turn.tokens[start : job.end])
        drafting, num_runs = [job for job in jobs if job.num_draft], 1
        logits = self._known(batch, jobs)
        while drafting:
            assert logits is not None
            turns = [job.turn for job in drafting]
            so_far = {turn: drafts[turn.turn_id] for turn in turns}
            places = Places(turns, [len(draft) for draft in so_far.values()], so_far)
            chosen = sample(logits, places, restrictions(places, {}), counts, self._sampling).tolist()
            batch, went_on = Batch(), array("i")
            for i, (job, token) in enumerate(zip(drafting, chosen, strict=True)):
                draft = drafts[job.turn.turn_id]
                draft.append(token)
                if len(draft) < job.num_draft:
                    self._add(batch, job, job.end + len(draft) - 1, draft[-1:])
                    went_on.append(i)
            drafting = [drafting[i] for i in went_on]
            logits = self._drafted(batch, went_on)
            num_runs += bool(drafting)
        return drafts, num_runs

    def _start(self, job: DraftJob) -> int:
        """The first token of a job that there is something to compute from."""
        return max(self.distance, job.start)

    def _known(self, batch: Batch, jobs: Sequence[DraftJob]) -> Tensor | None:
        """The logits after the jobs' known tokens, ``batch``."""
        return self._model.forward(batch)

    def _drafted(self, batch: Batch, went_on: array[int]) -> Tensor | None:
        """The logits after ``batch``: a drafted token of each of these samples of the last batch."""
        return self._model.forward(batch)

    def _add(self, batch: Batch, job: DraftJob, start: int, tokens: array[int]) -> None:
        batch.rows.append(job.row)
        batch.starts.append(start - self.distance)
        batch.counts.append(len(tokens))
        batch.tokens.extend(tokens)
        if job.num_draft:
            batch.logit_rows.append(len(batch.tokens) - 1)
