"""What other threads ask of the one that owns a rank: it runs between two steps, and answers by a future."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from holdfast.errors import HoldfastError

T = TypeVar("T")


def on_thread(act: Callable[[], T], put: Callable[[Callable[[], None]], None]) -> Future[T]:
    """``act()``'s result, when the thread has come to it. ``put``: queues a command of that thread."""
    done: Future[T] = Future()
    put(answering(lambda: done.set_result(act()), done))
    return done


def answering(run: Callable[[], None], done: Future[T]) -> Callable[[], None]:
    """``run``, with its HoldfastErrors going to who waits for ``done``; any other ends the thread."""

    def answering() -> None:
        try:
            run()
        except HoldfastError as error:
            done.set_exception(error)

    return answering
