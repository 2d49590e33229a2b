"""What a node's store holds: copies in an arena, and behind it on a disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from holdfast.v1 import store_pb2
from workers.store.copies import Copy, CopyIndex, is_nobody
from workers.store.disk import DiskTier


class Contents:
    """Both tiers as one. In the store's event loop."""

    def __init__(self, copies: CopyIndex, arena: memoryview, disk: DiskTier | None = None) -> None:
        self.copies, self.arena, self.disk = copies, arena, disk

    @property
    def counters(self) -> Counter[str]:
        return self.copies.counters + (self.disk.counters if self.disk is not None else Counter())

    def tiers(self, keys: Iterable[bytes]) -> bytearray:
        """Where each copy is."""
        return bytearray(self._tier(key) for key in keys)

    def data(self, copy: Copy) -> memoryview:
        """A copy's bytes, as long as it is pinned or held."""
        return self.arena[copy.offset : copy.offset + copy.num_bytes]

    def complete(self, copy: Copy, crc: int) -> None:
        """A reserved copy is written."""
        self.copies.complete(copy, crc)
        if self.disk is not None:
            self.disk.add(copy)

    def put(self, key: bytes, owner: str, crc: int, data: memoryview, *, is_replica: bool) -> Copy | None:
        """Take another store's copy. None if there is one already, or no room."""
        copy = self.copies.reserve(key, len(data), owner)
        if copy is not None:
            copy.is_replica = is_replica
            self.data(copy)[:] = data
            self.complete(copy, crc)
        return copy

    async def bring(self, keys: Sequence[bytes], user: str) -> None:
        """Bring copies into the arena that are on the disk."""
        if self.disk is not None:
            await self.disk.bring(keys, user)

    async def release(self, what: store_pb2.ReleaseCopies) -> int:
        """Drop a session's copies, or all of a tenant, or all. Returns how many the arena had."""
        if what.session_id:
            num_dropped = self.copies.release(what.session_id)
            if self.disk is not None:
                await self.disk.release(what.session_id)
        else:
            num_dropped = self.copies.flush(what.tenant)
            if self.disk is not None:
                await self.disk.flush(what.tenant)
        return num_dropped

    async def owners(self) -> list[str]:
        """The sessions that copies were made for."""
        owners = self.copies.owners()
        if self.disk is not None:
            owners = sorted({*owners, *(o for o in await self.disk.owners() if not is_nobody(o))})
        return owners

    async def stop(self) -> None:
        if self.disk is not None:
            await self.disk.stop()

    def _tier(self, key: bytes) -> int:
        if self.copies.has(key):
            return store_pb2.TIER_MEMORY
        return store_pb2.TIER_DISK if self.disk is not None and key in self.disk else store_pb2.TIER_NONE
