"""A decoder whose steps are tapes: recorded once, and run with any batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.kernels.cpu import ops
from workers.kernels.cpu.operations import CpuPlan, CpuProducts
from workers.kernels.cpu.tape import StepArrays, Tape, matrix, page_table
from workers.models.decoder import Decoder, ForwardBatch, Hidden
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

    def __init__(
        self, decoder: Decoder, tape: Tape, kv: KVPool, tables: Sequence[Tensor], taps: Sequence[int] = ()
    ) -> None:
        """``tables``: by group, int32 ``[sessions, max_pages]``. ``tape``: the one of the decoder's kernels, and no
        other's. ``taps``: see ``Decoder.hidden``.
        """
        self._decoder, self._tape, self._kv, self._tables, self._taps = decoder, tape, kv, tables, taps
        self._products = CpuProducts(tape)
        self._logits: ops.LinearOp | None = None
        self._states: Tensor | None = None
        self._hidden = Hidden(torch.empty(0), torch.empty(0), [])
        """For the largest step."""
        self._num_tokens = self._num_samples = 0
        """Of the last step."""

    def forward(self, step: StepArrays, states: Tensor | None = None) -> Tensor:
        """As ``Decoder.forward``. ``states``: see ``ForwardBatch``; given always or never."""
        if self._logits is None or len(step.tokens) > self._tape.max_tokens:
            self._record(max(FIRST_TOKENS, 1 << (len(step.tokens) - 1).bit_length()), has_states=states is not None)
        assert self._logits is not None
        num_tokens, num_samples = self._num_tokens, self._num_samples = len(step.tokens), len(step.logit_rows)
        if states is not None:
            assert self._states is not None
            self._states[:num_tokens] = states
        logits = torch.empty(num_samples, self._logits.weight.rows)
        self._logits.out = matrix(logits)
        self._tape.run(step)
        return self._decoder.whole_logits(logits)

    @property
    def hidden(self) -> Hidden:
        """Of the last step, until the next."""
        normed, last, taps = self._hidden
        of_samples = slice(self._num_samples)
        return Hidden(normed[of_samples], last[of_samples], [tap[: self._num_tokens] for tap in taps])

    def _record(self, max_tokens: int, *, has_states: bool) -> None:
        tape, page_size = self._tape, self._kv.page_size
        decoder = self._decoder.on(lambda group: TapedGroup(group, tape))
        with tape.recording(max_tokens):
            batch = self._prepared(page_size)
            if has_states:
                batch.states = self._states = tape.keep(tape.empty(max_tokens, decoder.config.hidden_size))
            self._hidden = decoder.hidden(batch, self._kv, self._taps)
            for part in (self._hidden.normed, self._hidden.last, *self._hidden.taps):
                tape.keep(part)
            out, head = tape.empty(1, 1, dtype=torch.float32), decoder.weights.head
            self._logits = self._products.linear_to(out, self._hidden.normed, head)

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
