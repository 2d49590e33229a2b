"""One rank: a model, its KV pool and its session cache on one device. Applies steps, decides nothing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import psutil
import torch

from holdfast.errors import ConfigError
from workers.config import EngineConfig
from workers.kernels.paged_attention import plan_attention
from workers.kv import SessionCache
from workers.models import ForwardBatch, KVPool, ModelConfig, load_decoder
from workers.models.config import DTYPES
from workers.sampler import SamplingRow, TokenLogprobs, logprobs_of, sample
from workers.scheduling import Step, Work

CPU_KV_TOKENS = 65_536
CPU_KV_MEMORY_FRACTION = 0.2
CUDA_KV_MEMORY_FRACTION = 0.85


@dataclass(slots=True)
class StepResult:
    """What a step gave, by turn id."""

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    input_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


class Rank:
    """Owns one device's model, KV and page tables."""

    def __init__(self, config: EngineConfig) -> None:
        self.model_config = ModelConfig.from_folder(config.model)
        self.device = _device(config.device)
        self.dtype = _dtype(config.dtype, self.model_config, self.device)
        self.context_len = _context_len(config.context_length, self.model_config)
        if self.device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        self.decoder = load_decoder(
            config.model, self.model_config, device=self.device, dtype=self.dtype, context_len=self.context_len
        )
        num_pages = self._num_pages(config)
        self.cache = SessionCache(num_pages, config.page_size, config.max_sessions)
        self.kv = KVPool(self.model_config, num_pages, config.page_size, self.dtype, self.device)
        max_pages = -(-self.context_len // config.page_size)
        # Entries that were never set point to the spare page past the pool's end.
        self.tables = torch.full((config.max_sessions, max_pages), num_pages, dtype=torch.int32, device=self.device)
        self._eos = frozenset(self.model_config.eos_token_ids)

    @torch.inference_mode()
    def apply(self, step: Step) -> StepResult:
        """Run a step: copies and table updates, one forward pass, sampling."""
        self._apply_updates(step)
        result = StepResult()
        if not step.work:
            return result
        wanted = [_input_logprob_rows(w) for w in step.work]
        logits = self.decoder.forward(self._batch(step.work, wanted), self.kv)
        self._sample(step.work, logits, result)
        self._input_logprobs(step.work, wanted, logits, result)
        return result

    def _apply_updates(self, step: Step) -> None:
        if step.table_updates:
            rows, columns, pages = (list(part) for part in zip(*step.table_updates, strict=True))
            # Later updates win: an entry can change twice in a step, and scattered writes have no order.
            last = dict(zip(zip(rows, columns, strict=True), pages, strict=True))
            index = torch.tensor(list(last), device=self.device).T
            values = torch.tensor(list(last.values()), dtype=torch.int32, device=self.device)
            self.tables[index[0], index[1]] = values
        self.kv.copy_pages(step.copies)
        self.cache.finish_copies(len(step.copies))

    def _batch(self, work: list[Work], wanted: list[range]) -> ForwardBatch:
        size, model = self.cache.page_size, self.model_config
        counts = [w.count for w in work]
        context_lens = [w.start + w.count for w in work]
        tokens = torch.tensor([t for w in work for t in w.turn.tokens[w.start : w.start + w.count]])
        positions = torch.tensor([p for w in work for p in range(w.start, w.start + w.count)])
        rows = torch.tensor([w.row for w in work], device=self.device)
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        tables = self.tables[:, : -(-max(context_lens) // size)].index_select(0, rows)
        sequence = torch.repeat_interleave(
            torch.arange(len(work), device=self.device), torch.tensor(counts, device=self.device)
        )
        pages = tables[sequence, positions // size].long()
        starts = [0, *itertools.accumulate(counts)]
        # Logits wanted: first those that give a token, then those of input tokens.
        logit_rows = [starts[i + 1] - 1 for i, w in enumerate(work) if w.samples]
        logit_rows += [starts[i] + p - w.start for i, w in enumerate(work) for p in wanted[i]]
        return ForwardBatch(
            tokens=tokens,
            positions=positions,
            write_pages=pages,
            write_offsets=positions % size,
            tables=tables,
            attention=plan_attention(
                counts, context_lens, model.num_heads // model.num_kv_heads, self.dtype, self.device
            ),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=self.device),
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

    def _input_logprobs(self, work: list[Work], wanted: list[range], logits: torch.Tensor, result: StepResult) -> None:
        at = sum(w.samples for w in work)
        for w, positions in zip(work, wanted, strict=True):
            if positions:
                targets = list(w.turn.tokens[positions.start + 1 : positions.stop + 1])
                tops = [max(0, w.turn.params.num_logprobs)] * len(targets)
                rows = logits[at : at + len(targets)]
                result.input_logprobs[w.turn.turn_id] = logprobs_of(rows, targets, tops)
                at += len(targets)

    def _num_pages(self, config: EngineConfig) -> int:
        page_bytes = KVPool.page_size_bytes(self.model_config, config.page_size, self.dtype)
        if config.max_total_tokens is not None:
            return -(-config.max_total_tokens // config.page_size)
        if self.device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(self.device)
            return max(2, int(free_bytes * CUDA_KV_MEMORY_FRACTION) // page_bytes)
        by_memory = int(psutil.virtual_memory().available * CPU_KV_MEMORY_FRACTION) // page_bytes
        return max(2, min(CPU_KV_TOKENS // config.page_size, by_memory))


def _input_logprob_rows(work: Work) -> range:
    """Positions of this work whose logits score an input token: those before each wanted token."""
    turn = work.turn
    if turn.params.logprob_start < 0:
        return range(0)
    last = min(work.start + work.count, turn.prompt_len - 1)
    return range(max(work.start, turn.params.logprob_start), max(last, turn.params.logprob_start, work.start))


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device here")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name!r} is not one of auto, cpu, cuda")
    return torch.device(name)


def _dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    if name == "auto":
        return model.dtype if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype: {name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _context_len(asked: int | None, model: ModelConfig) -> int:
    if asked is None:
        return model.max_context_len
    if asked > model.max_context_len:
        raise ConfigError(f"context_length: {asked} is more than the model's {model.max_context_len}")
    return asked
