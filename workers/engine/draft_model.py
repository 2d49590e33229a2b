"""A small model that proposes what a large one may say. Its KV lies in the large one's pages."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.errors import ConfigError
from workers.config import EngineConfig
from workers.engine.batch import Batch
from workers.engine.choice import restrictions
from workers.engine.memory import host_group
from workers.engine.paged_model import PagedModel
from workers.engine.penalties import PenaltyCounts
from workers.engine.sampler import Place, sample
from workers.kernels.backend import Backend
from workers.models import Decoder, KVPool, ModelConfig, read_config
from workers.scheduling.model_speculation import DraftJob


def read_draft_config(config: EngineConfig, target: ModelConfig) -> ModelConfig | None:
    """The draft model's, if there is one. Raises ConfigError if it does not fit the model that it drafts for."""
    path = config.speculative_draft_model_path
    if config.speculative_algorithm != "STANDALONE":
        if path is not None:
            raise ConfigError("speculative_draft_model_path: is for speculative_algorithm STANDALONE")
        return None
    if path is None:
        raise ConfigError("speculative_draft_model_path: STANDALONE needs a checkpoint")
    draft = read_config(path)
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative_draft_model_path: a vocabulary of {draft.vocab_size} tokens, and the model's has "
            f"{target.vocab_size}; they must be the same"
        )
    if host_group(target) < 0:
        raise ConfigError("speculative_draft_model_path: the model keeps no token beyond its sliding windows")
    return draft


class DraftModel:
    """Runs a draft model for one rank. Its KV has the pages of a group that keeps every token, whatever its own layers
    attend to: no page table, no length and no page is its own, so none can leak or differ.
    """

    def __init__(self, decoder: Decoder, backend: Backend, kv: KVPool, table: Tensor) -> None:
        """``kv``: with as many pages as the group whose page ``table`` it is. ``backend``: the decoder's own."""
        tables = [table] * len(decoder.config.kv_groups)
        self._model = PagedModel(decoder, backend, kv, tables, lambda chosen: chosen)
        self._add_noise = backend.add_noise

    @torch.inference_mode()
    def propose(self, jobs: Sequence[DraftJob], counts: PenaltyCounts) -> tuple[dict[str, array[int]], int]:
        """The jobs' drafts by turn id, and in how many runs. A token is chosen as the turn's own would be."""
        drafts = {job.turn.turn_id: array("i") for job in jobs if job.num_draft}
        batch = Batch()
        for job in jobs:
            _add(batch, job, job.start, job.turn.tokens[job.start : job.end])
        drafting, num_runs = [job for job in jobs if job.num_draft], 1
        logits = self._model.forward(batch)
        while drafting:
            assert logits is not None
            places = [Place(job.turn, drafts[job.turn.turn_id][:]) for job in drafting]
            chosen = sample(logits, places, restrictions(places, {}), counts, self._add_noise).tolist()
            batch = Batch()
            for job, token in zip(drafting, chosen, strict=True):
                draft = drafts[job.turn.turn_id]
                draft.append(token)
                if len(draft) < job.num_draft:
                    _add(batch, job, job.end + len(draft) - 1, draft[-1:])
            drafting = [job for job in drafting if len(drafts[job.turn.turn_id]) < job.num_draft]
            logits = self._model.forward(batch)
            num_runs += bool(drafting)
        return drafts, num_runs


def _add(batch: Batch, job: DraftJob, start: int, tokens: array[int]) -> None:
    batch.rows.append(job.row)
    batch.starts.append(start)
    batch.counts.append(len(tokens))
    batch.tokens.extend(tokens)
    if job.num_draft:
        batch.logit_rows.append(len(batch.tokens) - 1)
