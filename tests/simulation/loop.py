"""Simulated time and processes: an event loop whose clock jumps to the next timer, and whose callbacks
belong to processes that can be killed (their callbacks never run again) or paused (they run later).

Everything between two awaits is atomic, and what is ready at the same time runs in a fixed order: one
seed, one history.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


MAX_AT_ONCE = 100_000
"""Rounds of the loop at one moment: more is no progress."""


class Stuck(Exception):
    """Nothing is scheduled, or time stands still, while a task still waits."""


class Process:
    """What a kill -9 or a SIGSTOP hits. ``host``: where the network knows it."""

    def __init__(self, name: str, host: str, clock_skew_s: float = 0.0) -> None:
        self.name, self.host, self.clock_skew_s = name, host, clock_skew_s
        self.alive, self.paused = True, False
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)
        self._parked: list[tuple[Callable[..., object], tuple[Any, ...], contextvars.Context]] = []
        # A killed process must not run its clean-up: nothing of it may be collected as garbage.
        self.kept: list[object] = []

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in this process."""
        return asyncio.get_running_loop().create_task(coroutine, context=self.context.copy())

    def kill(self) -> None:
        self.alive = False
        self._parked.clear()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        parked, self._parked = self._parked, []
        for callback, args, context in parked:
            asyncio.get_running_loop().call_soon(callback, *args, context=context)

    def run(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.alive and not self.paused:
            callback(*args)
        elif self.alive:
            self._parked.append((callback, args, contextvars.copy_context()))


class _Clock:
    """What the loop takes for its selector: waiting is moving the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._since_it_moved = 0

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise Stuck("nothing is left to happen")
        before, self.now = self.now, self.now + max(0.0, timeout)
        self._since_it_moved = 0 if self.now > before else self._since_it_moved + 1
        if self._since_it_moved > MAX_AT_ONCE:
            raise Stuck("something happens again and again, and no time passes")
        return []

    def close(self) -> None:
        pass


class SimulatedLoop(asyncio.BaseEventLoop):
    """``on_callback`` is called with the number of callbacks run so far: a fault can strike at any of them."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Clock()
        self._clock_resolution = 1e-9
        self.num_callbacks = 0
        self.is_over = False
        """From then on nothing is taken any more: what is collected as garbage may still try."""
        self.on_callback: Callable[[int], None] = lambda count: None

    def time(self) -> float:
        return self._selector.now

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        if self.is_over:
            return asyncio.Handle(callback, args, self)
        return super().call_soon(self._run, _process(context), callback, args, context=context)

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        return super().call_at(when, self._run, _process(context), callback, args, context=context)

    def create_task(self, coroutine: Any, **keywords: Any) -> Any:
        task = super().create_task(coroutine, **keywords)
        process = _process(keywords.get("context"))
        if process is not None:
            process.kept.append(task)
        return task

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> Any:
        """At once, in this thread: there are no others."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run(self, process: Process | None, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.num_callbacks += 1
        self.on_callback(self.num_callbacks)
        if process is None:
            callback(*args)
        else:
            process.run(callback, args)

    def _process_events(self, events: list[object]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _asyncgen_firstiter_hook(self, generator: Any) -> None:
        process = PROCESS.get()
        if process is not None:
            process.kept.append(generator)


def _process(context: contextvars.Context | None) -> Process | None:
    return PROCESS.get() if context is None else context.get(PROCESS)
