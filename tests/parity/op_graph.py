"""CUDA graphs on a CPU: the operations of torch and the Triton kernels that a function ran, done again as they were.

As in a CUDA graph, no Python runs at a replay: each operation has the very tensors of its capture, and writes its
results into the very tensors that it gave then. What a step's batch says reaches a replay through memory alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from workers.kernels import attention_launch, elementwise_launch, experts_launch, products_launch

T = TypeVar("T")
FILLED_BY_OTHERS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


class OpGraphs(TorchDispatchMode):
    """A ``Capture`` for CPU tensors. The kernels' modules must hold ``Kernel``s: see ``kernels_in``."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Callable[[], None]] | None = None
        self.num_graphs = self.num_replays = 0

    def __call__(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        ops: list[Callable[[], None]] = []
        self.recorded = ops
        try:
            with self:
                result = run()
        finally:
            self.recorded = None
        self.num_graphs += 1
        return result, partial(self._replay, ops)

    def _replay(self, ops: list[Callable[[], None]]) -> None:
        self.num_replays += 1
        for op in ops:
            op()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "a graph cannot wait for a value"
        results = func(*args, **kwargs)
        assert self.recorded is not None
        in_place = any(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)
        # By memory, not by schema: some operations copy or return a view, as the case may be.
        is_view = bool(_memory_of(results) & _memory_of((args, kwargs)))
        if in_place or not (is_view or func.overloadpacket.__name__ in FILLED_BY_OTHERS):
            self.recorded.append(partial(_again, func, args, kwargs, results, in_place=in_place))
        return results


def _memory_of(values: Any) -> set[int]:
    return {leaf.untyped_storage()._cdata for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


def _again(func: Any, args: Any, kwargs: Any, results: Any, *, in_place: bool) -> None:
    new = func(*args, **kwargs)
    if not in_place:
        for old, value in zip(tree_leaves(results), tree_leaves(new), strict=True):
            old.copy_(value)


class Kernel:
    """A Triton kernel whose launches are part of the graph that is captured, if one is."""

    def __init__(self, kernel: Any, graphs: OpGraphs) -> None:
        self.arg_names: list[str] = kernel.arg_names
        self._kernel, self._graphs = kernel, graphs

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            act = partial(self._kernel[grid], *args, **constants)
            with _disable_current_modes():  # the interpreter has operations of its own
                act()
            if self._graphs.recorded is not None:
                self._graphs.recorded.append(act)

        return launch


def kernels_in(graphs: OpGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the launches of all kernels recorded."""
    for module in (attention_launch, elementwise_launch, experts_launch, products_launch):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Kernel(getattr(module, name), graphs))
