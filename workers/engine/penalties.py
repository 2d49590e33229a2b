"""How often turns with penalties have used each token, kept on the device from step to step.

A step brings the new tokens of each turn, not its history. The counts are a function of the turn's tokens: after
a failover they are counted again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.scheduling import SamplingParams, Turn


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What the counts lack. Arrays of one length, for ``PenaltyCounts.add``."""

    rows: array[int] = field(default_factory=lambda: array("i"))
    tokens: array[int] = field(default_factory=lambda: array("i"))
    is_output: array[int] = field(default_factory=lambda: array("i"))


class PenaltyCounts:
    """Counts of the tokens of turns; each turn has a row. For one thread."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._counted: dict[Turn, tuple[int, int]] = {}
        """By turn: its row, and how many of its tokens are counted."""
        self._free: list[int] = []

    def rows_of(self, turns: Sequence[Turn]) -> tuple[list[int], NewTokens]:
        """The turns' rows, and what is to be added to them. Rows of turns that have ended are free again."""
        for turn in [turn for turn in self._counted if turn.ended]:
            self._free.append(self._counted.pop(turn)[0])
        rows, new = [], NewTokens()
        for turn in turns:
            row, done = self._counted.get(turn) or (self._new_row(), 0)
            total = len(turn.tokens)
            self._counted[turn] = row, total
            new.rows.extend([row] * (total - done))
            new.tokens.extend(turn.tokens[done:])
            num_input = max(0, min(turn.prompt_len, total) - done)
            new.is_output.extend([0] * num_input + [1] * (total - done - num_input))
            rows.append(row)
        return rows, new

    def _new_row(self) -> int:
        if self._free:
            row = self._free.pop()
            self._seen.select(0, row).zero_()
            self._output.select(0, row).zero_()
            return row
        row, more = len(self._seen), max(8, len(self._seen))
        self._seen = torch.cat([self._seen, self._seen.new_zeros((more, self._seen.shape[1]))])
        self._output = torch.cat([self._output, self._output.new_zeros((more, self._output.shape[1]))])
        self._free = list(range(row + more - 1, row, -1))
        return row

    def add(self, rows: Tensor, tokens: Tensor, is_output: Tensor) -> None:
        """Count ``NewTokens``, on the device."""
        self._seen.index_put_((rows, tokens), torch.ones_like(rows, dtype=torch.bool))
        self._output.index_put_((rows, tokens), is_output, accumulate=True)

    def penalize(self, logits: Tensor, rows: Tensor, penalties: Tensor, drafted: tuple[Tensor, Tensor]) -> Tensor:
        """``logits [n, vocab]`` of the turns with these rows, after their ``penalties [3, n, 1]``.

        ``drafted``: of the ``n`` places, and the tokens that precede them beside those that are counted.
        """
        seen, output = self._seen.index_select(0, rows), self._output.index_select(0, rows)
        if len(drafted[0]):
            seen.index_put_(drafted, torch.ones_like(drafted[0], dtype=torch.bool))
            output.index_put_(drafted, torch.ones_like(drafted[0], dtype=torch.int32), accumulate=True)
        repetition, presence, frequency = penalties
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - torch.where(output > 0, presence + frequency * output, 0.0)


def penalties_of(params: Sequence[SamplingParams]) -> array[float]:
    """Their repetition, presence and frequency penalties, one kind after another."""
    kinds = ([p.repetition_penalty, p.presence_penalty, p.frequency_penalty] for p in params)
    return array("f", [value for kind in zip(*kinds, strict=True) for value in kind])
