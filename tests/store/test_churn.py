"""A day of sessions that come, return and go: a store is as large at its end as after its first hour."""

from __future__ import annotations

import asyncio
import gc
import random
import zlib
from pathlib import Path

import psutil

from holdfast.v1 import store_pb2
from workers.store.contents import Contents
from workers.store.copies import CopyIndex
from workers.store.disk import DiskTier

ARENA, SLAB, DISK, SEGMENT = 1024 * 1024, 64 * 1024, 2 * 1024 * 1024, 256 * 1024
PAGES = (192, 1000)
"""Bytes of a page, by group."""
HOUR_S, HOURS, HOURS_LONG = 3600, 5, 24
MAX_GROWTH = 8 * 1024 * 1024
"""Of the process, in bytes: its allocator keeps some of what was freed. A byte leaked a copy would be as much."""


class Churn:
    """Each second some session has a turn: its copies are asked for, new ones are made. Sessions end."""

    def __init__(self, contents: Contents) -> None:
        self._contents, self._rng = contents, random.Random(3)
        self._sessions: dict[str, list[bytes]] = {}
        self._next = 0

    async def second(self) -> None:
        rng, copies = self._rng, self._contents.copies
        if len(self._sessions) < 50 or rng.random() < 0.2:
            self._next += 1
            # Some begin like another one: they share its copies.
            begins = rng.choice(list(self._sessions.values())) if self._sessions and rng.random() < 0.3 else []
            self._sessions[f"{self._next % 3}\x1fs{self._next}"] = begins[: rng.randrange(8)]
        session = rng.choice(list(self._sessions))
        keys = self._sessions[session]
        await self._contents.bring(keys, session)
        pinned = [copy for key in keys if (copy := copies.pin(key, session)) is not None]
        assert all(zlib.crc32(self._contents.data(copy)) == copy.crc for copy in pinned)
        for copy in pinned:
            copies.unpin(copy)
        for _ in range(rng.randrange(1, 6)):
            key = rng.randbytes(16)
            copy = copies.reserve(key, rng.choice(PAGES), session)
            if copy is not None and rng.random() < 0.05:
                copies.abandon(copy)  # a rank died
            elif copy is not None:
                data = self._contents.data(copy)
                data[:] = key[:1] * len(data)
                self._contents.complete(copy, zlib.crc32(data))
                keys.append(key)
        if rng.random() < 0.2:
            gone = rng.choice(list(self._sessions))
            del self._sessions[gone]
            await self._contents.release(store_pb2.ReleaseCopies(session_id=gone))
            assert not [copy for copy in copies.owned(gone) if not copy.is_shared]

    async def flush(self) -> None:
        """A tenant's."""
        await self._contents.release(store_pb2.ReleaseCopies(tenant="1"))
        assert not [owner for owner in self._contents.copies.owners() if owner.startswith("1\x1f")]


async def written(contents: Contents) -> None:
    """Returns when the disk has nothing to do."""
    disk = contents.disk
    assert disk is not None
    while disk._waiting:
        await asyncio.sleep(0.01)
    await disk.owners()  # by the thread that writes, after the last copy


def check_sizes(contents: Contents, folder: Path) -> None:
    copies, disk = contents.copies, contents.disk
    assert disk is not None
    assert copies.num_bytes_used == sum(copy.size for copy in copies) <= ARENA
    free = sum(len(room) * size for size, room in copies._rooms.items()) + len(copies._free_slabs) * SLAB
    torn = sum(SLAB % slab.size for slab in copies._slabs if slab.num_used)
    assert copies.num_bytes_used + free + torn == ARENA, "every byte is used or free"
    assert sum(map(len, copies._by_owner.values())) == len(copies) and all(copies._by_owner.values())
    on_disk = sum(path.stat().st_size for path in folder.glob("0/segment-*"))
    assert on_disk == disk.num_bytes_used <= DISK
    segments = disk._segments
    assert sum(map(len, segments._by_owner.values())) == len(segments) and all(segments._by_owner.values())


async def test_a_day_leaves_a_store_as_large_as_an_hour(tmp_path: Path, long: bool) -> None:
    copies, arena = CopyIndex(ARENA, SLAB), memoryview(bytearray(ARENA))
    contents = Contents(copies, arena, DiskTier(tmp_path, DISK, copies, arena, SEGMENT))
    churn, sizes = Churn(contents), list[int]()
    try:
        for _ in range(HOURS_LONG if long else HOURS):
            for _ in range(HOUR_S):
                await churn.second()
                await asyncio.sleep(0)
            await churn.flush()
            await written(contents)
            check_sizes(contents, tmp_path)
            gc.collect()
            sizes.append(psutil.Process().memory_info().rss)
    finally:
        await contents.stop()
    assert contents.counters["evicted"] > 0 and contents.counters["disk_evicted"] > 0, "both were full"
    assert sizes[-1] - sizes[0] < MAX_GROWTH, f"after each hour: {sizes}"
