"""The order in which a device works: what is queued first is done first, and the host does not wait.

CUDA keeps such an order itself. A CPU that overlaps host and device has a thread for it; else each piece of
work is done when it is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Result(Protocol[T_co]):
    """What a piece of work returns, perhaps later."""

    def result(self) -> T_co:
        """Wait for it. Raises its error."""


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A result that is there. A future and its lock would cost each step some microseconds."""

    value: T

    def result(self) -> T:
        return self.value


class Stream:
    """Does each piece of work at once: on a device with a queue of its own, that is to queue it there."""

    def run(self, act: Callable[[], T]) -> Result[T]:
        """Do ``act`` after all that was queued before. Its error is raised here or by the result."""
        return Done(act())

    def close(self) -> None:
        """End what the stream owns. Work that was not begun is dropped."""


class ThreadStream(Stream):
    """A thread that plays the device. After an error nothing more is done: every later future raises it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "holdfast-device")
        self._error: BaseException | None = None

    def run(self, act: Callable[[], T]) -> Future[T]:
        return self._thread.submit(self._run, act)

    def _run(self, act: Callable[[], T]) -> T:
        if self._error is not None:
            raise self._error
        try:
            return act()
        except BaseException as error:
            self._error = error
            raise

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
