"""Runs a draft head, and keeps the states of the model that it continues from."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.batch import Batch
from workers.engine.draft_model import DraftModel
from workers.kernels.backend import Backend
from workers.kernels.upload import upload_parts
from workers.models import Hidden, KVPool
from workers.models.heads import DraftHead
from workers.scheduling import Work
from workers.scheduling.model_speculation import DraftJob


@dataclass(frozen=True, slots=True)
class _Kept:
    """A piece of a turn, whose states are rows from ``row`` on. Rows are counted from the first ever."""

    row: int
    turn_id: str
    start: int
    end: int


class KeptStates:
    """Which rows of a ring hold the states of which turns' positions."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._end = 0
        self._pieces: deque[_Kept] = deque()
        self._by_turn: dict[str, deque[_Kept]] = {}

    def add(self, pieces: Sequence[tuple[str, int, int]]) -> int:
        """A step computed these turns' positions ``[start, end)``. The row of the first; others follow.

        What lay in their rows is gone.
        """
        count = sum(end - start for _, start, end in pieces)
        assert count <= self.num_rows
        if self._end % self.num_rows + count > self.num_rows:  # a step's rows are together
            self._end += self.num_rows - self._end % self.num_rows
        first = self._end
        for turn_id, start, end in pieces:
            piece = _Kept(self._end, turn_id, start, end)
            self._pieces.append(piece)
            self._by_turn.setdefault(turn_id, deque()).append(piece)
            self._end += end - start
        while self._pieces[0].row < self._end - self.num_rows:
            turn_id = self._pieces.popleft().turn_id
            self._by_turn[turn_id].popleft()
            if not self._by_turn[turn_id]:
                del self._by_turn[turn_id]
        return first % self.num_rows

    def rows(self, turn_id: str, start: int, end: int) -> array[int]:
        """Where a turn's positions are; ``num_rows`` for those that are not there."""
        rows = array("i", [self.num_rows]) * (end - start)
        for piece in self._by_turn.get(turn_id, ()):  # a later one replaces an earlier one
            first, last = max(start, piece.start), min(end, piece.end)
            if first < last:
                row = (piece.row + first - piece.start) % self.num_rows
                rows[first - start : last - start] = array("i", range(row, row + last - first))
        return rows


class HeadModel(DraftModel):
    """Runs a head for one rank. A position whose state is not kept any more is computed from zeros: it can make a guess
    worse, and no other turn's state can be in its place.
    """

    distance = 1

    def __init__(
        self, head: DraftHead, taps: Sequence[int], backend: Backend, kv: KVPool, table: Tensor, num_kept: int
    ) -> None:
        """``num_kept``: positions, of all turns, whose states are kept. See ``DraftModel``."""
        super().__init__(head, backend, kv, table)
        self.taps, self._head = taps, head
        self._kept = KeptStates(num_kept)
        shape = (num_kept + 1, len(taps), head.target_size)
        self._states = torch.zeros(shape, dtype=head.dtype, device=head.device)

    @torch.inference_mode()
    def keep(self, work: Sequence[Work], hidden: Hidden) -> None:
        """See ``Drafter``."""
        if all(w.turn.is_given_up for w in work):
            return
        row = self._kept.add([(w.turn.turn_id, w.start, w.start + w.count) for w in work])
        for i, tap in enumerate(hidden.taps):
            self._states[row : row + len(tap), i] = tap

    def _known(self, batch: Batch, jobs: Sequence[DraftJob]) -> Tensor | None:
        if not jobs:
            return None
        rows = array("i")
        for job in jobs:
            rows += self._kept.rows(job.turn.turn_id, self._start(job) - 1, job.end - 1)
        at = upload_parts([rows], self._head.device)[0]
        states = self._head.states_of(self._states.index_select(0, at))
        return self._whole(self._model.forward(batch, states))

    def _drafted(self, batch: Batch, went_on: array[int]) -> Tensor | None:
        if not went_on:
            return None
        at = upload_parts([went_on], self._head.device)[0]
        states = self._head.next_states(self._model.hidden).index_select(0, at)
        return self._whole(self._model.forward(batch, states))

    def _whole(self, logits: Tensor | None) -> Tensor | None:
        """Logits of all tokens: those that the head cannot choose have none."""
        if logits is None or self._head.token_ids is None:
            return logits
        whole = torch.full((len(logits), self._head.config.vocab_size), -torch.inf, device=logits.device)
        whole[:, self._head.token_ids] = logits
        return whole
