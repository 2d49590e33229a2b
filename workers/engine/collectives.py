"""Collective operations of a worker's ranks: one process group an incarnation, gloo on CPU, NCCL on CUDA."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.models.parallel import Shard


class Collectives:
    """One rank's end of its group.

    All ranks of one incarnation create it over one store. An operation that a peer does not join raises
    RuntimeError after ``timeout_s``, or as soon as the peer's connection breaks. A rank that fails must
    end its process, because its peers' state is unknown then.
    """

    def __init__(self, store: dist.Store, shard: Shard, device: torch.device, host: str, timeout_s: float) -> None:
        self.shard = shard
        timeout = timedelta(seconds=timeout_s)
        self._group: Any  # torch's stubs lack most methods of the backends
        # Not torch.distributed's default group: there is one a process, and a failed one stays.
        if device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, shard.rank, shard.size, nccl)
        else:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            gloo._timeout = timeout
            self._group = dist.ProcessGroupGloo(store, shard.rank, shard.size, gloo)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        self._group.allreduce([x]).wait()
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x`` on every rank, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([x], options).wait()
        return x

    def minimum(self, value: int, device: torch.device) -> int:
        """The minimum of all ranks' values."""
        least = torch.tensor([value], device=device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
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
