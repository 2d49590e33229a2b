"""Processes of this cluster's nodes: who they are, how they end, and Ray's errors in our own terms."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import psutil
from ray.exceptions import RayError

from holdfast.errors import ConfigError, HoldfastError

END_GRACE_S = 1.0
"""Most end when Ray asks them; what is stopped, or stuck, does not."""
END_TIMEOUT_S = 10.0
SLICES = 4
"""Of the time that silence may last: one probe in each."""


def end_process(pid: int, created: float) -> None:
    """Wait until a process of this node is gone, or kill it; nothing happens if it is another by now."""
    try:
        process = psutil.Process(pid)
        if process.create_time() != created:
            return
        try:
            process.wait(END_GRACE_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(END_TIMEOUT_S)
    except psutil.NoSuchProcess:
        pass


async def death_of(actor: Any, name: str) -> str:
    """Returns when an actor's process died, or ended in order."""
    try:
        await actor.wait.remote()
    except RayError:
        return f"{name} died"
    return f"{name} ended"


async def first_of(*waits: Coroutine[Any, Any, str]) -> str:
    """What the first of them returns; the others are given up."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def silence_of(probe: Callable[[], Coroutine[Any, Any, object]], silence_s: float) -> None:
    """Returns when no probe was answered for ``silence_s`` of the time in which this process ran itself.

    Who was stopped, and wakes, must not take that for the silence of all others.
    """
    slice_s, silent, asked = silence_s / SLICES, 0, None
    try:
        while silent < SLICES:
            ends_at = time.monotonic() + slice_s
            asked = asked or asyncio.create_task(probe())
            await asyncio.wait([asked], timeout=slice_s)
            answered = asked.done() and asked.exception() is None
            if asked.done():
                asked = None
                await asyncio.sleep(ends_at - time.monotonic())
            slept = time.monotonic() > ends_at + slice_s
            silent = 0 if answered else silent + (not slept)
    finally:
        if asked is not None:
            asked.cancel()


@contextlib.contextmanager
def ray_errors() -> Iterator[None]:
    """What failed inside an actor, or with it, as the user should read it: HoldfastError for RayError."""
    try:
        yield
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HoldfastError):
            raise cause from None
        raise ConfigError(f"the cluster did not start: {cause or error}") from None
