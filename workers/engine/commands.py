"""Commands from other threads to the thread that owns a rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from holdfast.errors import HoldfastError

T = TypeVar("T")


def call_in_thread(act: Callable[[], T], put: Callable[[Callable[[], None]], None]) -> Future[T]:
    """Queue ``act`` for a thread by ``put``; the future gives its result or its HoldfastError."""
    done: Future[T] = Future()
    put(reporting_errors(lambda: done.set_result(act()), done))
    return done


def reporting_errors(run: Callable[[], None], done: Future[T]) -> Callable[[], None]:
    """``run``, with HoldfastErrors set on ``done``; any other error ends the thread."""

    def reporting() -> None:
        try:
            run()
        except HoldfastError as error:
            done.set_exception(error)

    return reporting
