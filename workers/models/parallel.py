"""Tensor parallelism as a model sees it: which part is this rank's, and how the parts come together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``rank`` of ``size`` of a model."""

    rank: int = 0
    size: int = 1
    by_expert: bool = False
    """A rank has whole experts, not each expert's share."""

    def of(self, total: int) -> tuple[int, int]:
        """This rank's ``[start, end)`` of ``total`` equal shares; the last ones are short if it does not divide."""
        share = -(-total // self.size)
        return min(total, self.rank * share), min(total, (self.rank + 1) * share)


class RankGroup(Protocol):
    """The collective operations of a tensor-parallel group. Every rank calls them in the same order."""

    @property
    def shard(self) -> Shard: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's ``x`` (all of one shape) on rank 0; None on the others."""
