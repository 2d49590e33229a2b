"""One rank: a model, its KV pool and its session cache on one device. Applies steps, decides nothing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Protocol

import torch
from torch import Tensor

from holdfast.errors import ConfigError
from workers.config import EngineConfig
from workers.engine.batch import Batch
from workers.engine.choice import Choice, PendingChoice
from workers.engine.collectives import Collectives
from workers.engine.decode_graphs import DecodeGraphs, capture_of
from workers.engine.draft_head import HeadModel
from workers.engine.draft_model import Drafter, DraftModel, read_draft_config
from workers.engine.memory import group_specs, host_group, pages_by_group, step_tokens
from workers.engine.paged_model import PagedModel
from workers.engine.penalties import PenaltyCounts
from workers.engine.step_log import RecordedCache
from workers.engine.stream import Stream, ThreadStream
from workers.grammar.compiler import GrammarCompiler
from workers.grammar.turns import Masks
from workers.kernels.backend import Backend, load_backend
from workers.kernels.fp8 import FP8
from workers.kernels.tile_table import read_table
from workers.kernels.tiles import BY_RULE
from workers.kernels.upload import Download, upload_parts
from workers.kv import PageCopy, SessionCache, TableUpdate
from workers.kv.page_events import FilledPage, PageEvents
from workers.models import Decoder, KVPool, ModelConfig, load_decoder, read_config
from workers.models.fields import DTYPES
from workers.models.head_loader import load_head
from workers.models.heads import HeadConfig
from workers.models.parallel import Shard
from workers.models.tensors import fingerprint
from workers.scheduling import Work
from workers.scheduling.model_speculation import MAX_HEAD_LAG, DraftJob


class NotePages(Protocol):
    """See ``Rank.watch_pages``."""

    def __call__(
        self, filled: Sequence[tuple[FilledPage, int]], released: Sequence[str], flushed: Sequence[str | None]
    ) -> None: ...


class Rank:
    """Owns one device's model (in a group: its shard), KV and page tables.

    The ranks of a group are created together: they agree on the number of pages.
    """

    def __init__(self, config: EngineConfig, group: Collectives | None = None) -> None:
        self.shard = group.shard if group is not None else Shard()
        self.model_config = read_config(config.model)
        self.grammar_compiler = GrammarCompiler(
            config.model / "tokenizer.json", self.model_config.vocab_size, self.model_config.eos_token_ids
        )
        self.device = pick_device(config.device)
        self.dtype = activation_dtype(config.dtype, self.model_config, self.device)
        backend = self._load_backend(config)
        self._sampling = backend.sampling
        self.step_tokens = step_tokens(config, self.device)
        """The most that a step computes."""
        config = replace(config, chunked_prefill_size=self.step_tokens)
        self.context_len = _context_len(config.context_length, self.model_config)
        if self.device.type == "cpu":
            # Beside kernels with threads of their own, torch's would wait actively on the same cores.
            torch.set_num_threads(1 if backend.tape is not None else config.num_threads)
        self.decoder = self._load_decoder(config, config.model, self.model_config, backend, group)
        model = self.decoder.config
        kv_dtype = kv_dtype_of(config.kv_cache_dtype, self.dtype)
        draft = read_draft_config(config, self.model_config)
        drafting = draft.model if isinstance(draft, HeadConfig) else draft
        num_pages = pages_by_group(config, model, kv_dtype, self.device, drafting)
        if group is not None:
            num_pages = [group.minimum(pages, self.device) for pages in num_pages]
        leads = self.shard.size > 1 and self.shard.rank == 0
        kind = RecordedCache if leads else SessionCache
        self.cache: SessionCache = kind(
            group_specs(model, num_pages), config.page_size, config.max_sessions, config.resume_points
        )
        self.kv = KVPool(model, num_pages, config.page_size, kv_dtype, self.device, self.decoder.kv_scales)
        max_pages = -(-self.context_len // config.page_size)
        # By group. Entries start at the spare page past the pool's end; the row past the last session keeps to it.
        self.tables = [
            torch.full((config.max_sessions + 1, max_pages), pages, dtype=torch.int32, device=self.device)
            for pages in num_pages
        ]
        self._drafter = self._load_drafter(config, draft, num_pages) if draft is not None else None
        checkpoints = [fingerprint(path) for path in (config.model, config.speculative_draft_model_path) if path]
        self.layout = (
            f"{config.page_size} tokens, {', '.join(str(size) for size in self.kv.page_bytes)} bytes {kv_dtype}, "
            f"{self.shard.size} ranks, checkpoint {' and '.join(checkpoints)}"
        )
        """Ranks with the same layout can read each other's pages."""
        taps = self._drafter.taps if self._drafter is not None else ()
        graphs = self._capture_graphs(config, backend, taps)
        self._model = PagedModel(self.decoder, backend, self.kv, self.tables, self._fed, taps, graphs)
        self._group = group
        overlap = config.overlap_schedule
        self.overlaps = self.device.type == "cuda" if overlap is None else overlap
        """Whether the host goes on while the device computes."""
        on_cpu = self.device.type == "cpu"
        self.stream = ThreadStream() if self.overlaps and on_cpu and self.shard.rank == 0 else Stream()
        self.writes_at_once = on_cpu and not isinstance(self.stream, ThreadStream)
        """Whether nothing is left for the device to do when the rank's thread does not compute."""
        self.cache_lock = RLock()
        """Held by the rank's thread while the cache may change, and by another one that writes an import's pages."""
        self._logits: Tensor | None = None
        self._note_pages: NotePages | None = None
        self._zeroes = config.zero_freed_pages
        self.zero_freed()
        self._chosen = torch.empty(0, dtype=torch.int64, device=self.device)
        self._counts = PenaltyCounts(self.model_config.vocab_size, self.device)

    @property
    def kv_bytes(self) -> int:
        """What its pools of pages hold, of all groups."""
        sizes = zip(self.cache.groups, self.kv.page_bytes, strict=True)
        return sum(group.pool.num_pages * page_bytes for group, page_bytes in sizes)

    def _load_backend(self, config: EngineConfig) -> Backend:
        return load_backend(
            config.attention_backend,
            self.device,
            dtype=self.dtype,
            deterministic=config.deterministic,
            quantization=config.quantization,
            num_threads=config.num_threads,
            tiles=BY_RULE if config.tile_table is None else read_table(config.tile_table, self.device),
        )

    def _load_decoder(
        self, config: EngineConfig, path: Path, model: ModelConfig, backend: Backend, group: Collectives | None
    ) -> Decoder:
        return load_decoder(
            path,
            model,
            device=self.device,
            dtype=self.dtype,
            context_len=self.context_len,
            weight_dtype=_weight_dtype(config, model, backend),
            group=group,
            expert_parallel=config.expert_parallel,
            kernels=backend,
        )

    def _capture_graphs(self, config: EngineConfig, backend: Backend, taps: Sequence[int]) -> DecodeGraphs | None:
        capture = capture_of(self.device)
        if capture is None or backend.plan_decodes is None or config.disable_cuda_graph:
            return None
        return DecodeGraphs(
            self.decoder,
            self.kv,
            self.tables,
            backend.plan_decodes,
            capture,
            max_batch=min(config.cuda_graph_max_bs, config.max_running_requests),
            context_len=self.context_len,
            taps=taps,
        )

    def _load_drafter(
        self, config: EngineConfig, draft: ModelConfig | HeadConfig, num_pages: Sequence[int]
    ) -> Drafter | None:
        """Every rank's pages hold a draft's KV, because they are alike; a group's leader alone computes it."""
        host, model = host_group(self.model_config), draft if isinstance(draft, ModelConfig) else draft.model
        kv = KVPool(model, [num_pages[host]] * len(model.kv_groups), config.page_size, self.kv.dtype, self.device)
        self.kv.take_in(kv, host)
        if self.shard.rank:
            return None
        backend, path = self._load_backend(config), config.speculative_draft_model_path or config.model
        if isinstance(draft, ModelConfig):
            decoder = self._load_decoder(config, path, draft, backend, None)
            return DraftModel(decoder, backend, kv, self.tables[host])
        head = load_head(
            path,
            draft,
            config.model,
            self.model_config,
            device=self.device,
            dtype=self.dtype,
            context_len=self.context_len,
            kernels=backend,
            weight_dtype=_weight_dtype(config, model, backend),
        )
        # What a step computes, and what a head may be behind.
        num_kept = self.step_tokens + config.max_running_requests * (
            MAX_HEAD_LAG + config.speculative_num_draft_tokens + 1
        )
        return HeadModel(head, draft.taps, backend, kv, self.tables[host], num_kept)

    def watch_pages(self, note: NotePages | None) -> PageEvents:
        """Have ``note`` called with the pages that are filled and computed, and with what is released and flushed.

        In the thread that computes. None: no more.
        """
        events = PageEvents()
        self.cache.index.events, self._note_pages = (events, note) if note is not None else (None, None)
        return events

    def tell_pages(self) -> None:
        """Tell who watches pages what has happened to them. What fills them was launched before."""
        events, note = self.cache.index.events, self._note_pages
        if events is None or note is None:
            return
        filled, released, flushed = events.take()
        if filled or released or flushed:
            self.stream.run(partial(note, filled, released, flushed))

    def zero_freed(self) -> None:
        """With ``zero_freed_pages``: have pages that were freed overwritten before anything is written to them."""
        for group in self.cache.groups if self._zeroes else ():
            freed = group.pool.take_freed()
            if freed:
                self.stream.run(partial(self.kv.zero_pages, group.index, freed))

    def update(self, copies: Sequence[PageCopy], table_updates: Sequence[TableUpdate]) -> None:
        """Queue a step's copies of pages and its changes of page tables."""
        self.zero_freed()
        if copies or table_updates:
            self.stream.run(partial(self._apply_updates, copies, table_updates))

    def draft(self, jobs: Sequence[DraftJob]) -> tuple[dict[str, array[int]], int]:
        """See ``Drafter.propose``. Waits for it. In a group, for its leader."""
        assert self._drafter is not None
        return self.stream.run(partial(self._drafter.propose, jobs, self._counts)).result()

    def launch(self, batch: Batch, num_copies: int) -> None:
        """Queue one forward pass. ``num_copies`` were queued before it."""
        # Whatever may write to a copied page from now on is queued later.
        self.cache.finish_copies(num_copies)
        self.stream.run(partial(self._forward, batch))

    def choose(self, work: Sequence[Work], masks: Future[Masks] | None = None) -> PendingChoice:
        """Queue the choice of the next tokens of the step that was launched last. In a group, for its leader.

        Turns that have ended get none. ``masks``: see ``TurnGrammars.masks``.
        """
        ended = [w.turn.ended for w in work]
        return PendingChoice(self.stream.run(partial(self._choose, work, ended, masks)))

    @torch.inference_mode()
    def _forward(self, batch: Batch) -> None:
        self._logits = self._model.forward(batch)

    @torch.inference_mode()
    def _choose(
        self, work: Sequence[Work], ended: Sequence[bool], masks: Future[Masks] | None
    ) -> tuple[Choice, Download]:
        logits = self._logits if self._logits is not None else torch.empty((0, 1), device=self.device)
        choice = Choice(work, ended, masks.result() if masks is not None else {})
        self._chosen, results = choice.queue(logits, self._counts, self._sampling)
        if self._drafter is not None:
            self._drafter.keep(work, self._model.hidden)
        return choice, Download(results)

    def _apply_updates(self, copies: Sequence[PageCopy], table_updates: Sequence[TableUpdate]) -> None:
        if self.device.type == "cpu":
            for group, row, first, entries in table_updates:
                self.tables[group].numpy()[row, first : first + len(entries)] = entries
        else:
            self._send_updates(table_updates)
        if copies:
            self._copy_pages(copies)

    @torch.inference_mode()
    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        self.kv.copy_pages(copies)

    @torch.inference_mode()
    def _send_updates(self, table_updates: Sequence[TableUpdate]) -> None:
        # The last update of an entry wins: it can change twice in a step, and indexed writes have no order.
        last: list[dict[tuple[int, int], int]] = [{} for _ in self.tables]
        for group, row, first, entries in table_updates:
            last[group].update(((row, column), page) for column, page in enumerate(entries, first))
        for table, changed in zip(self.tables, last, strict=True):
            if changed:
                parts = (*zip(*changed, strict=True), changed.values())
                rows, columns, pages = upload_parts([array("i", part) for part in parts], self.device)
                table.index_put_((rows, columns), pages)

    def _fed(self, chosen: Tensor) -> Tensor:
        """Tokens that were chosen last, on every rank: the leader's."""
        if self._group is None:
            return self._chosen[chosen]
        return self._group.broadcast(self._chosen[chosen] if self.shard.rank == 0 else torch.empty_like(chosen))


def pick_device(name: str) -> torch.device:
    """``auto``: CUDA where there is one. Raises ConfigError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is configured, but torch finds no CUDA device on this machine")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name!r} is not one of auto, cpu, cuda")
    return torch.device(name)


def activation_dtype(name: str, model: ModelConfig, device: torch.device) -> torch.dtype:
    """What ``dtype`` means. Raises ConfigError."""
    if name == "auto":
        return model.dtype if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype: {name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _weight_dtype(config: EngineConfig, model: ModelConfig, backend: Backend) -> torch.dtype | None:
    """Panels are multiplied as they are stored: what the checkpoint has, unless it was chosen otherwise."""
    return model.dtype if backend.tape is not None and config.dtype == "auto" else None


def kv_dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """What ``kv_cache_dtype`` means, with activations of ``dtype``. Raises ConfigError."""
    if name not in ("auto", "fp8_e4m3"):
        raise ConfigError(f"kv_cache_dtype: {name!r} is not one of auto, fp8_e4m3")
    return dtype if name == "auto" else FP8


def _context_len(configured: int | None, model: ModelConfig) -> int:
    if configured is None:
        return model.max_context_len
    if configured > model.max_context_len:
        raise ConfigError(f"context_length: {configured} is more than the model's {model.max_context_len}")
    return configured
