"""How far the start of a rank is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` things. ``stage``: what is done with them, as a person reads it."""

    stage: str
    done: int
    total: int


_LISTENER: ContextVar[Callable[[Progress], None]] = ContextVar("holdfast.progress", default=lambda progress: None)
"""Of the start that runs in a context, and in the threads that it waits for."""


@contextmanager
def progress_told_to(listener: Callable[[Progress], None]) -> Iterator[None]:
    """``listener`` is called from the thread that loads."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell_progress(stage: str, done: int, total: int) -> None:
    """Tell whoever waits for this start, if anybody does."""
    _LISTENER.get()(Progress(stage, done, total))
