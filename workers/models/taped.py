"""A decoder whose steps are tapes: recorded once, and run with any batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.kernels.cpu import ops
from workers.kernels.cpu.operations import CpuPlan, CpuProducts
from workers.kernels.cpu.tape import StepArrays, Tape, matrix, page_table
from workers.models.decoder import Decoder, ForwardBatch
from workers.models.kv_pool import KVPool
from workers.models.mixers import GroupBatch
from workers.models.parallel import RankGroup, Shard

FIRST_TOKENS = 32
"""A tape is recorded anew, for twice as many tokens or more, when a step has more than any before."""


class TapedGroup:
    """A rank's group on a tape: what the ranks sum is summed between two parts of it."""

    def __init__(self, group: RankGroup, tape: Tape) -> None:
        self._group, self._tape = group, tape

    @property
    def shard(self) -> Shard:
        return self._group.shard

    def all_reduce(self, x: Tensor) -> Tensor:
        self._tape.call(lambda count: self._group.all_reduce(x.narrow(0, 0, count)))
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        return self._group.gather(x)


class TapedDecoder:
    """Runs a decoder on ``kv`` and the page tables of its KV groups, all of which stay where they are."""

    def __init__(self, decoder: Decoder, tape: Tape, kv: KVPool, tables: Sequence[Tensor]) -> None:
        """``tables``: by group, int32 ``[sessions, max_pages]``. ``tape``: the one of the decoder's kernels."""
        self._decoder, self._tape, self._kv, self._tables = decoder, tape, kv, tables
        self._products = CpuProducts(tape)
        self._logits: ops.LinearOp | None = None

    def forward(self, step: StepArrays) -> Tensor:
        """As ``Decoder.forward``."""
        if self._logits is None or len(step.tokens) > self._tape.max_tokens:
            self._record(max(FIRST_TOKENS, 1 << (len(step.tokens) - 1).bit_length()))
        assert self._logits is not None
        logits = torch.empty(len(step.logit_rows), self._logits.weight.rows)
        self._logits.out = matrix(logits)
        self._tape.run(step)
        return self._decoder.whole_logits(logits)

    def _record(self, max_tokens: int) -> None:
        tape, page_size = self._tape, self._kv.page_size
        decoder = self._decoder.on(lambda group: TapedGroup(group, tape))
        with tape.recording(max_tokens):
            batch = self._prepared(page_size)
            hidden = decoder.hidden(batch, self._kv)
            self._logits = self._products.linear_to(tape.empty(1, 1, dtype=torch.float32), hidden, decoder.weights.head)

    def _prepared(self, page_size: int) -> ForwardBatch:
        """What the operations read of a step, once its arrays are there."""
        tape = self._tape
        tokens, positions, offsets = (tape.keep(tape.empty(tape.max_tokens, dtype=torch.int64)) for _ in range(3))
        logit_rows = tape.keep(tape.empty(tape.max_samples, dtype=torch.int64))
        tape.add(
            ops.PrepareOp,
            tokens,
            tokens=tokens.data_ptr(),
            positions=positions.data_ptr(),
            offsets=offsets.data_ptr(),
            logit_rows=logit_rows.data_ptr(),
            page_size=page_size,
        )
        groups = []
        for group, table in zip(self._decoder.config.kv_groups, self._tables, strict=True):
            pages = tape.keep(tape.empty(tape.max_tokens, dtype=torch.int64))
            tape.add(ops.PagesOp, pages, table=page_table(table, page_size), pages=pages.data_ptr())
            groups.append(GroupBatch(pages, CpuPlan(tape, table, page_size, group.window)))
        return ForwardBatch(tokens, positions, offsets, groups, logit_rows)
