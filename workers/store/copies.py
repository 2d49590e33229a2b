"""Which copies of pages are where in an arena. No I/O: the arena's bytes are others'.

The arena is divided into slabs of one size, and a slab into copies of one size. A slab without copies serves any size
again. When there is no room, the sessions whose copies were not used for the longest time give way, each from its last
copy on: without the first of them the others are of no use.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.names import SEPARATOR

SLAB_BYTES = 16 * 1024 * 1024
ALIGNMENT = 64
NOBODY = "\0"
"""Owns, of each tenant, copies of a prefix that other sessions use, when the one that computed it is gone."""


def nobody_of(owner: str) -> str:
    """NOBODY of the tenant of a session."""
    tenant, separator, _ = owner.removeprefix(NOBODY).rpartition(SEPARATOR)
    return f"{NOBODY}{tenant}{separator}"


def is_nobody(owner: str) -> bool:
    """Whether no session's release deletes its copies."""
    return owner.startswith(NOBODY)


def is_of_tenant(owner: str, tenant: str) -> bool:
    """Whether a session, or nobody, is of a tenant."""
    return owner.removeprefix(NOBODY).startswith(tenant + SEPARATOR)


@dataclass(slots=True, eq=False)
class Copy:
    """A copy, or the room for one that is being written."""

    key: bytes
    offset: int
    size: int
    """Bytes that it takes of the arena."""
    num_bytes: int
    """Bytes that it has."""
    owner: str
    """The session that had it made: its release deletes the copy, unless another session has used it."""
    crc: int | None = None
    """CRC-32 of its bytes; None: not complete."""
    is_shared: bool = False
    is_replica: bool = False
    """Of another node's copy, and not used here yet: that node sees to it that there are enough."""
    num_pins: int = 0
    is_gone: bool = False
    """It cannot be found any more. Its room is free when nobody reads or writes it."""


@dataclass(slots=True)
class _Slab:
    size: int = 0
    num_used: int = 0


class CopyIndex:
    """Copies by key. For one thread.

    ``zeroed``: the arena, if the room of copies that are gone is to be overwritten there.
    """

    def __init__(self, num_bytes: int, slab_bytes: int = SLAB_BYTES, *, zeroed: memoryview | None = None) -> None:
        self._zeroed = zeroed
        self._slab_bytes = slab_bytes
        self._slabs = [_Slab() for _ in range(num_bytes // slab_bytes)]
        self._free_slabs = list(range(len(self._slabs) - 1, -1, -1))
        self._rooms: dict[int, dict[int, None]] = {}
        """By size of a copy, the free places for such."""
        self._copies: dict[bytes, Copy] = {}
        self._by_owner: OrderedDict[str, dict[bytes, Copy]] = OrderedDict()
        """Least recently used first; of each, in the order of their tokens."""
        self.num_bytes_used = 0
        self.counters: Counter[str] = Counter()

    def __contains__(self, key: bytes) -> bool:
        """Also while it is written."""
        return key in self._copies

    def __iter__(self) -> Iterator[Copy]:
        return iter(list(self._copies.values()))

    def has(self, key: bytes) -> bool:
        """Whether there is a complete copy."""
        copy = self._copies.get(key)
        return copy is not None and copy.crc is not None

    def __len__(self) -> int:
        return len(self._copies)

    def reserve(self, key: bytes, num_bytes: int, owner: str) -> Copy | None:
        """Room for a copy. None if there is one of that key already, or no room.

        The caller ends the reservation with ``complete`` or ``abandon``.
        """
        known = self._copies.get(key)
        if known is not None:
            self._use(known, owner)
            return None
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        offset = self._allocate(size)
        if offset is None:
            self.counters["no_room"] += 1
            return None
        copy = self._copies[key] = Copy(key, offset, size, num_bytes, owner)
        self._by_owner.setdefault(owner, {})[key] = copy
        self._use(copy, owner)
        self.num_bytes_used += size
        return copy

    def complete(self, copy: Copy, crc: int) -> None:
        """A reserved copy is written. One that was released meanwhile is not kept."""
        assert copy.crc is None
        copy.crc = crc
        self.counters["stored"] += 1
        if copy.is_gone:
            self._free(copy)

    def abandon(self, copy: Copy) -> None:
        """A reserved copy was not written."""
        assert copy.crc is None
        self._forget(copy)
        self._free(copy)

    def pin(self, key: bytes, owner: str) -> Copy | None:
        """A complete copy, which stays where it is until ``unpin``. None if there is none."""
        copy = self._copies.get(key)
        if copy is None or copy.crc is None:
            return None
        self._use(copy, owner)
        copy.num_pins += 1
        return copy

    def hold(self, copy: Copy) -> None:
        """As ``pin``, for one that does not use it."""
        copy.num_pins += 1

    def unpin(self, copy: Copy) -> None:
        """A reader is done with a copy."""
        copy.num_pins -= 1
        if copy.is_gone and not copy.num_pins:
            self._free(copy)

    def drop(self, copies: Iterable[Copy]) -> int:
        """Have copies not be found any more. Returns how many were."""
        found = [copy for copy in copies if not copy.is_gone]
        for copy in found:
            self._forget(copy)
            if not copy.num_pins and copy.crc is not None:
                self._free(copy)
        return len(found)

    def release(self, owner: str) -> int:
        """Drop what only this session has used. Returns how many copies."""
        return self.drop([copy for copy in self.owned(owner) if not copy.is_shared])

    def owned(self, owner: str) -> list[Copy]:
        """What was made for a session."""
        return list(self._by_owner.get(owner, {}).values())

    def owners(self) -> list[str]:
        """The sessions that copies were made for."""
        return [owner for owner in self._by_owner if not is_nobody(owner)]

    def flush(self, tenant: str = "") -> int:
        """Drop all, or all of a tenant. Returns how many copies."""
        return self.drop([copy for copy in self if not tenant or is_of_tenant(copy.owner, tenant)])

    # ---- inside ----------------------------------------------------------------------------------

    def _use(self, copy: Copy, owner: str) -> None:
        self._by_owner.move_to_end(copy.owner)
        copy.is_shared |= copy.owner != owner

    def _allocate(self, size: int) -> int | None:
        if size > self._slab_bytes or not self._slabs:
            return None
        room = self._rooms.setdefault(size, {})
        while not room and not self._free_slabs:
            if not self._evict_oldest():
                return None
        if not room:
            slab = self._free_slabs.pop()
            self._slabs[slab].size = size
            first = slab * self._slab_bytes
            room.update(dict.fromkeys(range(first, first + self._slab_bytes - size + 1, size)))
        offset = next(iter(room))
        del room[offset]
        self._slabs[offset // self._slab_bytes].num_used += 1
        return offset

    def _evict_oldest(self) -> bool:
        for owned in self._by_owner.values():
            for copy in reversed(owned.values()):
                if copy.crc is not None and not copy.num_pins:
                    self.drop([copy])
                    self.counters["evicted"] += 1
                    return True
        return False

    def _forget(self, copy: Copy) -> None:
        if copy.is_gone:
            return
        copy.is_gone = True
        del self._copies[copy.key]
        owned = self._by_owner[copy.owner]
        del owned[copy.key]
        if not owned:
            del self._by_owner[copy.owner]

    def _free(self, copy: Copy) -> None:
        if self._zeroed is not None:
            self._zeroed[copy.offset : copy.offset + copy.size] = bytes(copy.size)
        slab = self._slabs[copy.offset // self._slab_bytes]
        self.num_bytes_used -= copy.size
        slab.num_used -= 1
        room = self._rooms[copy.size]
        room[copy.offset] = None
        if not slab.num_used:
            first = copy.offset // self._slab_bytes * self._slab_bytes
            for offset in range(first, first + self._slab_bytes - copy.size + 1, copy.size):
                del room[offset]
            self._free_slabs.append(copy.offset // self._slab_bytes)
