"""A digest of a rank's KV state, updated in O(changes). Ranks compare it at each step (law L8).

The state is a set of elements: each page of each group with its reference count, each slot with its lengths
and its page tables. The digest is the sum of the elements' hashes (a multiset hash: order does not matter,
and a changed element is subtracted and added again). A page table is itself such a sum, over its held
entries, which changes with the table (``PageTable.digest``).

Elements are tuples of integers, whose ``hash`` is the same in every process of one Python build (only
strings are salted). The digest detects mistakes, not adversaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from workers.kv.pages import PagePool
from workers.kv.slot import Slot

MASK = 2**64 - 1


class StateDigest:
    """The digest, and the elements it was computed from. ``configuration``: what ranks must be made alike with."""

    def __init__(self, pools: Sequence[PagePool], configuration: tuple[int, ...]) -> None:
        self._pools = pools
        self.configuration = configuration
        self._value = hash(configuration)
        self._refcounts = [[0] * pool.num_pages for pool in pools]
        self._names: dict[Slot, int] = {}
        self._elements: dict[Slot, int] = {}
        self._touched: dict[Slot, None] = {}

    @property
    def num_touched(self) -> int:
        """How many slots changed since the last update."""
        return len(self._touched)

    def touch(self, slot: Slot) -> None:
        """A slot changed."""
        self._touched[slot] = None

    def update(self) -> int:
        """The 64-bit digest after the changes since the last update."""
        value = self._value
        for group, (pool, seen) in enumerate(zip(self._pools, self._refcounts, strict=True)):
            for page in pool.touched:
                count = pool.refcounts[page]
                if seen[page] != count:
                    value += hash((group, page, count)) - hash((group, page, seen[page]))
                    seen[page] = count
            pool.touched.clear()
        for slot in self._touched:
            element = self._element(slot)
            value += element - self._elements.get(slot, 0)
            self._elements[slot] = element
        self._touched.clear()
        self._value = value & MASK
        return self._value

    def drop(self, slot: Slot) -> None:
        """Remove a dropped slot."""
        self._touched.pop(slot, None)
        self._names.pop(slot, None)
        self._value -= self._elements.pop(slot, 0)

    def _element(self, slot: Slot) -> int:
        name = self._names.get(slot)
        if name is None:
            hashed = hashlib.blake2b(slot.session_id.encode(), digest_size=8).digest()
            name = self._names[slot] = int.from_bytes(hashed, "little")
        first = slot.tables[0]  # there is often no other: this runs for every turn in each step
        state = (
            name,
            slot.row,
            slot.running,
            slot.committed_len,
            slot.allocated_len,
            slot.reserved_len,
            slot.base_len,
            len(slot.tokens),
            *slot.turn_starts,
            first.digest,
            len(first.pages),
        )
        for table in slot.tables[1:]:
            state += (table.digest, len(table.pages))
        return hash(state)
