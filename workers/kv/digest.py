"""A digest of a rank's KV state, updated in O(changes). Ranks compare it at each step (law L8).

The state is a set of elements: each page with its reference count, each slot with its lengths and its
page table. The digest is the sum of the elements' hashes (a multiset hash: order does not matter, and
a changed element is subtracted and added again). A page table is hashed as a chain, so that a cut or
an append costs only what it changes.

Elements are tuples of integers, whose ``hash`` is the same in every process of one Python build (only
strings are salted). The digest detects mistakes, not adversaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from workers.kv.slot import Slot

MASK = 2**64 - 1


class StateDigest:
    """The digest, and the elements it was computed from."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._value = hash((num_pages, page_size))
        self._refcounts = [0] * num_pages
        self._slots: dict[Slot, _SlotDigest] = {}
        # Slots that changed since the last update, with the number of leading pages that did not.
        self._touched: dict[Slot, int] = {}

    @property
    def num_touched(self) -> int:
        """How many slots changed since the last update."""
        return len(self._touched)

    def touch(self, slot: Slot, num_kept: int | None = None) -> None:
        """A slot changed, all but its first ``num_kept`` pages (default: all its pages now)."""
        if num_kept is None:
            num_kept = len(slot.pages)
        if self._touched.get(slot, num_kept) >= num_kept:
            self._touched[slot] = num_kept

    def update(self, refcounts: list[int], touched_pages: Iterable[int]) -> int:
        """The 64-bit digest after the changes since the last update."""
        value, seen = self._value, self._refcounts
        for page in touched_pages:
            if seen[page] != refcounts[page]:
                value += hash((page, refcounts[page])) - hash((page, seen[page]))
                seen[page] = refcounts[page]
        for slot, num_kept in self._touched.items():
            known = self._slots.get(slot)
            if known is None:
                known = self._slots[slot] = _SlotDigest(slot.session_id)
            chain, pages = known.chain, slot.pages
            # Most decodes do not change the table.
            if num_kept + 1 < len(chain) or len(chain) <= len(pages):
                del chain[num_kept + 1 :]
                for page in pages[len(chain) - 1 :]:
                    chain.append(hash((chain[-1], page)))
            element = hash(
                (
                    chain[-1],
                    slot.row,
                    slot.running,
                    slot.committed_len,
                    slot.allocated_len,
                    slot.base_len,
                    len(slot.tokens),
                )
            )
            value += element - known.element
            known.element = element
        self._touched.clear()
        self._value = value & MASK
        return self._value

    def drop(self, slot: Slot) -> None:
        """Remove a dropped slot."""
        self._touched.pop(slot, None)
        known = self._slots.pop(slot, None)
        if known is not None:
            self._value -= known.element


class _SlotDigest:
    """One slot's term of the sum, and the chained hashes of its page table, one a page."""

    __slots__ = ("chain", "element")

    def __init__(self, session_id: str) -> None:
        name = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
        self.chain = [int.from_bytes(name, "little")]
        self.element = 0
