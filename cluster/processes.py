"""Processes of this cluster's nodes: who they are, how they end, and Ray's errors in our own terms."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import grpc
import psutil
from ray.exceptions import RayError

from holdfast.errors import HoldfastError
from holdfast.silence import silent_for

END_GRACE_S = 1.0
"""Most end when Ray asks them; what is stopped, or stuck, does not."""
END_TIMEOUT_S = 10.0
PROBES_PER_LEASE = 8


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


async def unanswered_for(lease_s: float, probe: Callable[[], Awaitable[object]]) -> None:
    """Returns when a process that is asked again and again has answered nothing for a lease."""
    num_answers = 0

    async def ask() -> None:
        nonlocal num_answers
        while True:
            with contextlib.suppress(RayError, grpc.aio.AioRpcError):
                await probe()
                num_answers += 1
            await asyncio.sleep(lease_s / PROBES_PER_LEASE)

    asking = asyncio.create_task(ask())
    try:
        await silent_for(lease_s, lambda: num_answers)
    finally:
        asking.cancel()


@contextlib.contextmanager
def ray_errors(failed: str) -> Iterator[None]:
    """What ``failed`` inside an actor, or with it, as the user should read it: HoldfastError for RayError."""
    try:
        yield
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HoldfastError):
            raise cause from None
        raise HoldfastError(f"{failed}: {cause or error}") from None
