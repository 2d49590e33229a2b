"""One rank: a model, its KV pool and its session cache on one device. Applies steps, decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
import torch

from holdfast.errors import ConfigError
from workers.config import EngineConfig
from workers.engine.batch import Batch, scored_positions
from workers.engine.collectives import Collectives
from workers.engine.sampler import SamplingRow, TokenLogprobs, logprobs_of, sample
from workers.engine.step_log import RecordedCache
from workers.kernels.paged_attention import plan_attention
from workers.kv import PageCopy, SessionCache, TableUpdate
from workers.models import ForwardBatch, KVPool, ModelConfig, load_decoder
from workers.models.config import DTYPES
from workers.models.loader import fingerprint
from workers.models.parallel import Shard
from workers.scheduling import Step, Work

CPU_KV_TOKENS = 65_536
CPU_KV_MEMORY_FRACTION = 0.2
CUDA_KV_MEMORY_FRACTION = 0.85


@dataclass(slots=True)
class StepResult:
    """A step's results by turn id."""

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    input_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


class Rank:
    """Owns one device's model (in a group: its shard), KV and page tables.

    The ranks of a group are created together: they agree on the number of pages.
    """

    def __init__(self, config: EngineConfig, group: Collectives | None = None) -> None:
        self.shard = group.shard if group is not None else Shard()
        self.model_config = ModelConfig.from_folder(config.model)
        self.device = pick_device(config.device)
        self.dtype = _dtype(config.dtype, self.model_config, self.device)
        self.context_len = _context_len(config.context_length, self.model_config)
        if self.device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        self.decoder = load_decoder(
            config.model,
            self.model_config,
            device=self.device,
            dtype=self.dtype,
            context_len=self.context_len,
            group=group,
        )
        num_pages = self._num_pages(config)
        if group is not None:
            num_pages = group.minimum(num_pages, self.device)
        leads = self.shard.size > 1 and self.shard.rank == 0
        kind = RecordedCache if leads else SessionCache
        self.cache: SessionCache = kind(num_pages, config.page_size, config.max_sessions)
        self.kv = KVPool(self.decoder.config, num_pages, config.page_size, self.dtype, self.device)
        model = self.decoder.config
        self.layout = (
            f"{config.page_size} x {model.num_layers} x {model.num_kv_heads} x {model.head_dim} {self.dtype}, "
            f"{self.shard.size} ranks, checkpoint {fingerprint(config.model)}"
        )
        """Ranks with the same layout can read each other's pages."""
        max_pages = -(-self.context_len // config.page_size)
        # Entries start at the spare page past the pool's end.
        self.tables = torch.full((config.max_sessions, max_pages), num_pages, dtype=torch.int32, device=self.device)
        self._eos = frozenset(self.model_config.eos_token_ids)

    def apply(self, step: Step, batch: Batch) -> StepResult:
        """The leader's part of a step: compute, and choose the tokens."""
        result = StepResult()
        with torch.inference_mode():
            logits = self.compute(batch, step.copies, step.table_updates)
            if logits is not None:
                self._sample(step.work, logits, result)
                self._input_logprobs(step.work, logits, result)
        return result

    @torch.inference_mode()
    def compute(
        self, batch: Batch, copies: Sequence[PageCopy], table_updates: Sequence[TableUpdate]
    ) -> torch.Tensor | None:
        """Apply copies and table updates, then run one forward pass. Returns ``Decoder.forward``'s logits, if any."""
        self._apply_updates(copies, table_updates)
        return self.decoder.forward(self._forward_batch(batch), self.kv) if batch.rows else None

    def _apply_updates(self, copies: Sequence[PageCopy], table_updates: Sequence[TableUpdate]) -> None:
        if table_updates:
            rows, columns, pages = (list(part) for part in zip(*table_updates, strict=True))
            # The last update of an entry wins: it can change twice in a step, and indexed writes have no order.
            last = dict(zip(zip(rows, columns, strict=True), pages, strict=True))
            index = torch.tensor(list(last), device=self.device).T
            values = torch.tensor(list(last.values()), dtype=torch.int32, device=self.device)
            self.tables[index[0], index[1]] = values
        self.kv.copy_pages(copies)
        self.cache.finish_copies(len(copies))

    def _forward_batch(self, batch: Batch) -> ForwardBatch:
        size, model, counts = self.cache.page_size, self.decoder.config, batch.counts
        context_lens = [start + count for start, count in zip(batch.starts, counts, strict=True)]
        spans = zip(batch.starts, context_lens, strict=True)
        positions = torch.tensor([p for start, end in spans for p in range(start, end)]).to(self.device)
        rows = torch.tensor(batch.rows, device=self.device)
        tables = self.tables[:, : -(-max(context_lens) // size)].index_select(0, rows)
        sequence = torch.repeat_interleave(
            torch.arange(len(counts), device=self.device), torch.tensor(counts, device=self.device)
        )
        return ForwardBatch(
            tokens=torch.tensor(batch.tokens, dtype=torch.int64).to(self.device),
            positions=positions,
            write_pages=tables[sequence, positions // size].long(),
            write_offsets=positions % size,
            tables=tables,
            attention=plan_attention(
                counts, context_lens, model.num_heads // model.num_kv_heads, self.dtype, self.device
            ),
            logit_rows=torch.tensor(batch.logit_rows, dtype=torch.int64, device=self.device),
        )

    def _sample(self, work: list[Work], logits: torch.Tensor, result: StepResult) -> None:
        turns = [w.turn for w in work if w.samples]
        if not turns:
            return
        rows = [SamplingRow(t.params, t.tokens, t.prompt_len, t.banned_tokens(self._eos)) for t in turns]
        logits = logits[: len(turns)]
        with_logprobs = [i for i, t in enumerate(turns) if t.params.num_logprobs >= 0]
        raw = logits[with_logprobs].clone() if with_logprobs else None
        tokens = sample(logits, rows)
        result.tokens = {t.turn_id: token for t, token in zip(turns, tokens, strict=True)}
        if raw is not None:
            chosen = [tokens[i] for i in with_logprobs]
            tops = [turns[i].params.num_logprobs for i in with_logprobs]
            for i, logprobs in zip(with_logprobs, logprobs_of(raw, chosen, tops), strict=True):
                result.logprobs[turns[i].turn_id] = logprobs

    def _input_logprobs(self, work: list[Work], logits: torch.Tensor, result: StepResult) -> None:
        at = sum(w.samples for w in work)
        for w in work:
            positions = scored_positions(w)
            if positions:
                targets = list(w.turn.tokens[positions.start + 1 : positions.stop + 1])
                tops = [max(0, w.turn.params.num_logprobs)] * len(targets)
                rows = logits[at : at + len(targets)]
                result.input_logprobs[w.turn.turn_id] = logprobs_of(rows, targets, tops)
                at += len(targets)

    def _num_pages(self, config: EngineConfig) -> int:
        page_bytes = KVPool.page_size_bytes(self.decoder.config, config.page_size, self.dtype)
        if config.max_total_tokens is not None:
            return -(-config.max_total_tokens // config.page_size)
        if self.device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            return max(2, int(free_bytes * CUDA_KV_MEMORY_FRACTION) // page_bytes)
        by_memory = int(psutil.virtual_memory().available * CPU_KV_MEMORY_FRACTION) // page_bytes
        return max(2, min(CPU_KV_TOKENS // config.page_size, by_memory))


def pick_device(name: str) -> torch.device:
    """``auto``: CUDA where there is one. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is configured, but torch finds no CUDA device on this machine")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name!r} is not one of auto, cpu, cuda")
    return torch.device(name)


def _dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        return model.dtype if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype: {name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _context_len(configured: int | None, model: ModelConfig) -> int:
    if configured is None:
        return model.max_context_len
    if configured > model.max_context_len:
        raise ConfigError(f"context_length: {configured} is more than the model's {model.max_context_len}")
    return configured
