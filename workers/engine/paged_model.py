"""A decoder over the page tables of its KV groups: a batch of the step log in, logits out."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from workers.engine.batch import Batch
from workers.engine.decode_graphs import DecodeGraphs
from workers.kernels.backend import Backend
from workers.kernels.cpu.tape import StepArrays
from workers.kernels.upload import upload_parts
from workers.models import Decoder, ForwardBatch, GroupBatch, Hidden, KVPool
from workers.models.taped import TapedDecoder


class PagedModel:
    """Runs a decoder on ``kv`` and ``tables``, which stay where they are. For the thread that owns the device."""

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        kv: KVPool,
        tables: Sequence[Tensor],
        fed: Callable[[Tensor], Tensor],
        taps: Sequence[int] = (),
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """``tables``: by KV group, int32 ``[sessions, max_pages]``. ``fed``: tokens that were chosen on the device, by
        their number among those chosen last. ``taps``: see ``Decoder.hidden``. ``graphs``: of the same decoder.
        """
        self._decoder, self._kv, self._fed, self._taps = decoder, kv, fed, taps
        self._graphs = graphs
        config = decoder.config
        windows = [group.window for group in config.kv_groups]
        self._groups = list(zip(windows, config.head_shapes, tables, strict=True))
        self._plan_attention = backend.plan_attention
        self._taped = TapedDecoder(decoder, backend.tape, kv, tables, taps) if backend.tape else None
        self._hidden = Hidden(torch.empty(0), torch.empty(0), [])

    def forward(self, batch: Batch, states: Tensor | None = None) -> Tensor | None:
        """The logits of the batch's ``logit_rows``, fp32 ``[samples, vocab]``; None if the batch is empty.

        ``states``: see ``ForwardBatch``.
        """
        if not batch.rows:
            return None
        if self._taped is not None:
            return self._taped.forward(self._step_arrays(batch), states)
        if self._graphs is not None and (decoded := self._graphs.forward(batch, self._fed)) is not None:
            self._hidden, logits = decoded
            return logits
        prepared = self._forward_batch(batch)
        prepared.states = states
        self._hidden = self._decoder.hidden(prepared, self._kv, self._taps)
        return self._decoder.logits(self._hidden.normed)

    @property
    def hidden(self) -> Hidden:
        """Of the last batch, until the next."""
        return self._taped.hidden if self._taped is not None else self._hidden

    def _step_arrays(self, batch: Batch) -> StepArrays:
        tokens = batch.tokens
        places = [i for i, token in enumerate(tokens) if token < 0]
        if places:
            tokens = tokens[:]
            fed = self._fed(torch.tensor([-1 - tokens[i] for i in places]))
            for i, token in zip(places, fed.tolist(), strict=True):
                tokens[i] = token
        rest = (array("i", part) for part in (batch.rows, batch.starts, batch.counts, batch.logit_rows))
        return StepArrays(tokens, *rest)

    def _forward_batch(self, batch: Batch) -> ForwardBatch:
        # By whole arrays: a prefill has thousands of tokens.
        size, starts, counts = self._kv.page_size, np.array(batch.starts), np.array(batch.counts)
        known, sequences, positions = np.frombuffer(batch.tokens, dtype=np.int32), np.arange(len(counts)), starts
        if len(known) > len(counts):  # not decodes alone
            firsts = np.cumsum(counts) - counts
            sequences = np.repeat(sequences, counts)
            positions = np.arange(len(known)) + np.repeat(starts - firsts, counts)
        places = np.flatnonzero(known < 0)
        parts = [known, positions, positions // size, positions % size, sequences, places, -1 - known[places]]
        parts += [np.array(batch.rows), np.array(batch.logit_rows, dtype=np.int32)]
        # One copy to the device for all of them.
        together = array("i", np.concatenate(parts, dtype=np.int32, casting="same_kind").tobytes())
        packed = upload_parts([together], self._decoder.device)[0].long()
        tokens, at, column, offsets, sequence, fed, fed_from, rows, logit_rows = packed.split_with_sizes(
            [len(part) for part in parts]
        )
        if len(places):
            tokens.index_put_((fed,), self._fed(fed_from))
        context_lens = (starts + counts).tolist()
        num_columns = -(-max(context_lens) // size)
        groups, dtype = [], self._decoder.dtype
        for window, heads, whole in self._groups:
            tables = whole[:, :num_columns].index_select(0, rows)
            plan = self._plan_attention(
                tables, batch.counts, context_lens, size, heads=heads, dtype=dtype, window=window
            )
            groups.append(GroupBatch(tables[sequence, column].long(), plan))
        return ForwardBatch(
            tokens=tokens,
            positions=at,
            write_offsets=offsets,
            groups=groups,
            logit_rows=logit_rows,
        )
