"""The store's disk: copies go there behind the arena's, and come back when they are asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from workers.store.copies import Copy, CopyIndex
from workers.store.segments import SEGMENT_BYTES, Segments

T = TypeVar("T")
log = logging.getLogger("holdfast.store")
MAX_WAITING = 65_536
"""Copies to be written. When more are made, those that waited longest are not."""
ERROR_PAUSE_S = 5.0
"""After a disk failed, copies of this time are not written."""
READ_TOGETHER = 32
MAX_READ_S = 5.0
"""Of one request: what is not read by then is computed."""


class DiskTier:
    """Writes completed copies, and brings them back into the arena. Lives in the store's event loop."""

    def __init__(
        self,
        folder: Path,
        num_bytes: int,
        copies: CopyIndex,
        arena: memoryview,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Finds what is there. Raises OSError."""
        self._segments = Segments(folder, num_bytes, segment_bytes)
        self._copies, self._arena = copies, arena
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-disk")
        self._waiting: deque[Copy] = deque(maxlen=MAX_WAITING)
        self._changed = asyncio.Event()
        self._resumes_at = 0.0
        self._task = asyncio.get_running_loop().create_task(self._write())

    def __contains__(self, key: bytes) -> bool:
        return key in self._segments

    @property
    def counters(self) -> Counter[str]:
        return self._segments.counters

    @property
    def num_bytes_used(self) -> int:
        return self._segments.num_bytes_used

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)
        self._segments.close()

    def add(self, copy: Copy) -> None:
        """A copy is complete."""
        if time.monotonic() >= self._resumes_at:
            self._waiting.append(copy)
            self._changed.set()

    async def bring(self, keys: Sequence[bytes], user: str) -> None:
        """Bring copies back into the arena, as far as there is room and time."""
        wanted = [key for key in keys if key in self._segments and key not in self._copies]
        ends_at = time.monotonic() + MAX_READ_S
        for first in range(0, len(wanted), READ_TOGETHER):
            if time.monotonic() > ends_at:
                return
            together = wanted[first : first + READ_TOGETHER]
            found = await self._run(partial(self._read, together, user)) or ()
            for key, read in zip(together, found, strict=False):
                if read is None:
                    continue
                data, crc, owner = read
                copy = self._copies.reserve(key, len(data), owner)
                if copy is not None:
                    self._arena[copy.offset : copy.offset + len(data)] = data
                    self._copies.complete(copy, crc)

    async def release(self, owner: str) -> None:
        """See ``Segments``."""
        await self._run(lambda: self._segments.release(owner))

    async def flush(self, tenant: str) -> None:
        """See ``Segments``."""
        await self._run(lambda: self._segments.flush(tenant))

    async def owners(self) -> list[str]:
        """See ``Segments``."""
        return await self._run(self._segments.owners) or []

    async def _write(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting:
                copy = self._waiting.popleft()
                if copy.is_gone:
                    continue
                # Nobody may write there meanwhile. If it is released, that is done after this, in the same thread.
                self._copies.hold(copy)
                try:
                    await self._run(partial(self._append, copy))
                finally:
                    self._copies.unpin(copy)

    def _append(self, copy: Copy) -> None:
        assert copy.crc is not None, "it is complete"
        data = self._arena[copy.offset : copy.offset + copy.num_bytes]
        self._segments.append(copy.key, copy.owner, data, copy.crc)

    def _read(self, keys: Sequence[bytes], user: str) -> list[tuple[bytes, int, str] | None]:
        return [self._segments.read(key, user) for key in keys]

    async def _run(self, act: Callable[[], T]) -> T | None:
        """Do something in the disk's thread. None if the disk failed."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, act)
        except OSError as error:
            self.counters["disk_errors"] += 1
            if time.monotonic() >= self._resumes_at:
                log.warning("the KV store's disk failed; copies are not written for %s s: %s", ERROR_PAUSE_S, error)
            self._resumes_at = time.monotonic() + ERROR_PAUSE_S
            self._waiting.clear()
            return None
