"""What the ranks of a group compute together: one process group per incarnation, gloo on CPU, NCCL on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model this rank holds: part ``rank`` of ``size``."""

    rank: int = 0
    size: int = 1

    def of(self, total: int) -> tuple[int, int]:
        """This rank's ``[start, end)`` of ``total`` equal shares; the last ones are short if it does not divide."""
        share = -(-total // self.size)
        return min(total, self.rank * share), min(total, (self.rank + 1) * share)


class Collectives:
    """One rank's end of its group.

    Made by all ranks of one incarnation over one store. An operation that a peer does not join fails
    with RuntimeError after ``timeout_s``, or as soon as the peer's connection breaks: a rank that fails
    must end its process, for its peers' state is unknown then.
    """

    def __init__(self, store: dist.Store, shard: Shard, device: torch.device, host: str, timeout_s: float) -> None:
        self.shard = shard
        timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup
        # Not the default group of torch.distributed: that is one per process, and stays when it fails.
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, shard.rank, shard.size, nccl)
        else:
            gloo = dist.ProcessGroupGloo._Options()
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            gloo._timeout = timeout
            self._group = dist.ProcessGroupGloo(store, shard.rank, shard.size, gloo)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        self._group.allreduce([x]).wait()
        return x

    def minimum(self, value: int, device: torch.device) -> int:
        """The least of all ranks' values."""
        least = torch.tensor([value], device=device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._group.allreduce([least], options).wait()
        return int(least.item())

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Every rank's ``x`` (of one shape) on rank 0; None on the others."""
        options = dist.GatherOptions()
        options.rootRank = 0
        if self.shard.rank != 0:
            self._group.gather([], [x], options).wait()
            return None
        parts = [torch.empty_like(x) for _ in range(self.shard.size)]
        self._group.gather([parts], [x], options).wait()
        return parts
