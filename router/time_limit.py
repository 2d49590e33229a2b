"""Python code that must end: it runs in a thread of its own, and is stopped there."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
THREAD = "holdfast-limited"


class _Stopped(BaseException):
    """Raised in a thread whose time is over, between two bytecodes. Not an Exception: nothing handles it by chance."""


async def within(limit_s: float, work: Callable[[], T]) -> T:
    """The result of ``work``. Raises TimeoutError when it takes longer, and has it end.

    A call into C, such as a long regular expression, ends first.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    lock, ended = threading.Lock(), False

    def tell(result: Any, error: Exception | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    def run() -> None:
        nonlocal ended
        with suppress(_Stopped, RuntimeError):  # the loop may be closed by then
            try:
                result, error = work(), None
            except Exception as raised:
                result, error = None, raised
            loop.call_soon_threadsafe(tell, result, error)
            with lock:
                ended = True

    def stop() -> None:
        with lock:  # the thread lives at least until it has had the lock: its number is not another's
            if not ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped)
                )

    # Not one of a pool: if it is stopped just when the work is done, nothing else is hit.
    thread = threading.Thread(target=run, name=THREAD, daemon=True)
    thread.start()
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    finally:
        if answer.cancelled():
            stop()
