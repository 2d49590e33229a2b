"""A step of a model as one call: its operations are recorded once, and run with any batch.

A model's own code is the recording: it calls the operations with tensors of the largest size, which get buffers and
compute nothing. A buffer is free for another tensor once no tensor and no view of it is left.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from workers.kernels.cpu.ops import OPS, Matrix, Norm, Op, Pages, PageTable
from workers.kernels.fp8 import FP8

AnOp = TypeVar("AnOp", bound=Op)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, FP8: 3}
ALIGNMENT = 64
VIEWS = frozenset(
    (
        *("__get__", "__getitem__", "__len__", "data_ptr", "dim", "is_contiguous", "numel", "size", "stride"),
        *("flatten", "frombuffer", "narrow", "reshape", "split", "transpose", "unbind", "unsqueeze", "view"),
    )
)
"""What a recording may do with tensors besides calling operations."""


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What a step computes, sequence after sequence: arrays of 32-bit integers (see ``engine.batch.Batch``)."""

    tokens: array[int]
    rows: array[int]
    starts: array[int]
    counts: array[int]
    logit_rows: array[int]


class Tape:
    """Operations on activations of ``dtype``, float32 or bfloat16, for up to ``max_tokens`` tokens a step.

    A tensor's first dimension says whether its rows are the tokens or the samples, of which there is one more.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        self.library, self.dtype = library, dtype
        self.max_tokens = 0
        self.context = library.holdfast_open(num_threads)
        self.close = weakref.finalize(self, library.holdfast_close, self.context)
        self._parts: list[list[Op] | Callable[[int], object]] = []
        self._calls: list[ctypes.Array[ctypes.c_void_p] | Callable[[int], object]] = []
        self._free: list[bytearray] = []
        self._kept: list[Tensor] = []

    @property
    def max_samples(self) -> int:
        return self.max_tokens + 1

    @contextmanager
    def recording(self, max_tokens: int) -> Iterator[None]:
        """What is called inside is recorded, in place of what was. Raises TypeError for what a tape cannot record."""
        self.max_tokens = max_tokens
        self._parts, self._free, self._kept = [[]], [], []
        with torch.inference_mode(False), torch.no_grad(), _ViewsOnly():  # else views have no base
            yield
        self._free = []
        self._calls = [part if callable(part) else _pointers(part) for part in self._parts]

    # ---- recording -----------------------------------------------------------------------------------

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A buffer for an operation's result."""
        dtype = dtype or self.dtype
        size = prod(shape) * dtype.itemsize + ALIGNMENT
        fitting = [memory for memory in self._free if size <= len(memory) <= 2 * size]
        memory = min(fitting, key=len) if fitting else bytearray(size)
        if fitting:
            self._free.remove(memory)
        offset = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % ALIGNMENT
        whole = torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset)
        # A view's base lives as long as the view; the memory, as long as the tape.
        weakref.finalize(whole, self._free.append, memory)
        return whole.view(shape)

    def keep(self, tensor: Tensor) -> Tensor:
        """``tensor`` is read whenever the tape is run: its memory is no other's."""
        self._kept.append(tensor)
        return tensor

    def add(self, kind: type[AnOp], rows: Tensor, **fields: Any) -> AnOp:
        """Record an operation on as many rows as ``rows`` has."""
        last = self._parts[-1]
        assert isinstance(last, list)
        op = kind(code=OPS.index(kind), of_samples=len(rows) == self.max_samples, **fields)
        last.append(op)
        return op

    def call(self, act: Callable[[int], object]) -> None:
        """Record a call from here, with the number of tokens."""
        self._parts += [act, []]

    # ---- running -------------------------------------------------------------------------------------

    def run(self, step: StepArrays) -> None:
        """Compute a step of at most ``max_tokens`` tokens."""
        assert len(step.tokens) <= self.max_tokens
        for call in self._calls:
            self._run(call, step)

    def run_each(self, step: StepArrays) -> Iterator[type[Op] | None]:
        """Compute a step one operation at a time; its kind, when it is done, or None for a call. To measure them."""
        for part in self._parts:
            for op in [None] if callable(part) else part:
                self._run(_pointers([op]) if op is not None else part, step)
                yield None if op is None else type(op)

    def _run(self, call: Any, step: StepArrays) -> None:
        if callable(call):
            call(len(step.tokens))
            return
        arrays = (step.tokens, step.rows, step.starts, step.counts, step.logit_rows)
        tokens, rows, starts, counts, logit_rows = (each.buffer_info()[0] for each in arrays)
        self.library.holdfast_run(
            self.context, KINDS[self.dtype], call, len(call), tokens, len(step.tokens), rows, starts, counts,
            len(step.rows), logit_rows, len(step.logit_rows),
        )  # fmt: skip


def _pointers(ops: list[Op]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(ops))(*[ctypes.addressof(op) for op in ops])


class _ViewsOnly(TorchFunctionMode):
    """Refuses what computes: it would run once, at the recording, and never again."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ == "contiguous" and args[0].is_contiguous():
            return args[0]
        if func.__name__ not in VIEWS:
            raise TypeError(f"a tape cannot record {func.__name__}")
        return func(*args, **(kwargs or {}))


def matrix(x: Tensor | None) -> Matrix:
    """Rows of any stride. ``[rows, heads, dim]``: a row's heads lie where the operation is told."""
    if x is None:
        return Matrix(None, 0)
    assert x.stride(-1) == 1 or x.shape[-1] == 1, x.stride()
    return Matrix(x.data_ptr(), x.stride(0))


def norm(weight: Tensor | None, dtype: torch.dtype) -> Norm:
    """A norm's weight for activations of ``dtype``, which it may have itself."""
    if weight is None:
        return Norm(None, 0)
    assert weight.dtype in (dtype, torch.float32)
    return Norm(weight.data_ptr(), weight.dtype is torch.float32)


def pages(tensor: Tensor | None) -> Pages:
    """KV ``[pages, kv_heads, page_size, dim]``."""
    if tensor is None:
        return Pages(None, 0, 0, 0)
    return Pages(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), KINDS[tensor.dtype])


def page_table(table: Tensor, page_size: int) -> PageTable:
    """int32 ``[sessions, max_pages]``"""
    return PageTable(table.data_ptr(), table.stride(0), page_size)
