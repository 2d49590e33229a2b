"""Decodes as CUDA graphs: a step is captured once for each size of batch, and replayed with what a batch says.

A graph does the same launches on the same memory whenever it is replayed, and no Python. So what a batch says lies in
one tensor that all of them read; whatever follows from it (positions, pages, lengths) is computed in the graph. A batch
between two sizes is padded with sequences whose pages are the spare one, past a pool's end.

The bits are those of a step that is not captured: no kernel's sums depend on the batch (law L14).
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from holdfast.errors import ConfigError
from workers.engine.batch import Batch
from workers.kernels.attention import DecodePlanner
from workers.kernels.upload import upload_parts
from workers.models import Decoder, ForwardBatch, GroupBatch, Hidden, KVPool
from workers.progress import tell_progress

T = TypeVar("T")

SHORT_CONTEXT = 4096
"""A graph for contexts up to this long starts no programs for what only longer ones have."""


class Capture(Protocol):
    """What makes a graph of a function that only launches."""

    def __call__(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What ``run`` returned, and what does its launches again: into the same tensors, from the same ones."""


class CudaCapture:
    """Graphs that share their memory: one at a time is replayed, and what it returns is read before the next."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Raises OutOfMemoryError."""
        warm_up, stream = torch.cuda.Stream(), torch.cuda.current_stream()
        warm_up.wait_stream(stream)
        with torch.cuda.stream(warm_up):  # compiles the kernels, which a capture cannot
            run()
        stream.wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return result, graph.replay


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage is collected: a graph or an event among it would be destroyed, which ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def capture_of(device: torch.device) -> Capture | None:
    """None: the device has no graphs."""
    return CudaCapture() if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class Graph:
    """One captured step."""

    hidden: Hidden
    logits: Tensor
    replay: Callable[[], None]


def sizes_up_to(most: int) -> list[int]:
    """The sizes of batches that have a graph, ascending: at most a third of a larger one is padding."""
    sizes = [size for power in range(most.bit_length()) for size in (2**power, 3 * 2**power // 2) if size < most]
    return sorted({*sizes, most})


class DecodeGraphs:
    """The graphs of one model, captured when it is made. For the thread that owns the device."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        tables: Sequence[Tensor],
        plan: DecodePlanner,
        capture: Capture,
        *,
        max_batch: int,
        context_len: int,
        taps: Sequence[int] = (),
    ) -> None:
        """``tables``: as ``PagedModel``'s; the last row's pages are spare ones.

        Raises ConfigError if the device has no memory for them.
        """
        self._decoder, self._kv, self._tables, self._plan, self._taps = decoder, kv, tables, plan, taps
        self._sizes = sizes_up_to(max_batch)
        self._contexts = [SHORT_CONTEXT, context_len] if context_len > SHORT_CONTEXT else [context_len]
        self._spare_row = len(tables[0]) - 1
        # By token, position and row: what a batch says of each sequence.
        nothing, spare = (
            torch.full((max_batch,), n, dtype=torch.int32, device=decoder.device) for n in (0, self._spare_row)
        )
        self._said = torch.stack((nothing, nothing, spare))
        self._logits: Tensor | None = None
        """Of the largest batch. The other graphs' are copied to its beginning, so that their memory is used again."""
        self._graphs: dict[tuple[int, int], Graph] = {}
        for done, size in enumerate(reversed(self._sizes), 1):  # the largest first: the others fit into its memory
            for most in self._contexts:
                self._graphs[size, most] = self._captured(capture, size, most)
            tell_progress("captures graphs", done, len(self._sizes))

    @torch.inference_mode()
    def _captured(self, capture: Capture, size: int, most: int) -> Graph:
        def run() -> tuple[Hidden, Tensor]:
            hidden = self._decoder.hidden(self._batch(size, most), self._kv, self._taps)
            logits = self._decoder.logits(hidden.normed)
            if self._logits is not None:
                logits = self._logits.narrow(0, 0, size).copy_(logits)
            return hidden, logits

        try:
            (hidden, logits), replay = capture(run)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"cuda_graph_max_bs: no memory for the graph of {size} sequences ({error}); lower it, or "
                "max_total_tokens or mem_fraction_static, or set disable_cuda_graph"
            ) from error
        self._logits = logits if self._logits is None else self._logits
        return Graph(hidden, logits, replay)

    def _batch(self, size: int, most: int) -> ForwardBatch:
        tokens, positions, rows = self._said.narrow(1, 0, size).long().unbind()
        page_size, config, groups = self._kv.page_size, self._decoder.config, []
        column = (positions // page_size).unsqueeze(1)
        for group, heads, whole in zip(config.kv_groups, config.head_shapes, self._tables, strict=True):
            tables = whole.narrow(1, 0, -(-most // page_size)).index_select(0, rows)
            first_layer = config.layer_groups.index(group)
            plan = self._plan(
                tables,
                positions + 1,
                page_size,
                heads=heads,
                dtype=self._decoder.dtype,
                kv_heads=self._kv.k[first_layer].shape[1],
                most=most,
                window=group.window,
            )
            groups.append(GroupBatch(tables.gather(1, column).squeeze(1).long(), plan))
        logit_rows = torch.arange(size, device=self._decoder.device)
        return ForwardBatch(tokens, positions, positions % page_size, groups, logit_rows)

    def forward(self, batch: Batch, fed: Callable[[Tensor], Tensor]) -> tuple[Hidden, Tensor] | None:
        """The hidden states and logits of a batch, until the next; None if no graph computes it.

        ``fed``: see ``PagedModel``.
        """
        count = len(batch.rows)
        if count > self._sizes[-1] or batch.counts != [1] * count or batch.logit_rows != list(range(count)):
            return None
        size = next(size for size in self._sizes if size >= count)
        graph = self._graphs[size, next(most for most in self._contexts if max(batch.starts) < most)]
        self._say(batch, size, fed)
        graph.replay()
        normed, last, *taps = (
            part.narrow(0, 0, count) for part in (graph.hidden.normed, graph.hidden.last, *graph.hidden.taps)
        )
        return Hidden(normed, last, taps), graph.logits.narrow(0, 0, count)

    def _say(self, batch: Batch, size: int, fed: Callable[[Tensor], Tensor]) -> None:
        """Have the graph of ``size`` sequences read the batch: one copy to the device."""
        padding = size - len(batch.rows)
        said = batch.tokens + array("i", bytes(4 * padding))
        said += array("i", [*batch.starts, *[0] * padding, *batch.rows, *[self._spare_row] * padding])
        places = array("i", [i for i, token in enumerate(batch.tokens) if token < 0])
        chosen = array("i", [-1 - batch.tokens[i] for i in places])
        whole, at, fed_from = upload_parts([said, places, chosen], self._decoder.device)
        self._said.narrow(1, 0, size).copy_(whole.view(3, size))
        if places:
            self._said.select(0, 0).index_put_((at,), fed(fed_from.long()).int())
