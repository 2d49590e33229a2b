"""A digest of a rank's KV state, kept up to date in O(changes): what ranks compare at each step (law L8).

The state is a set of elements: each page with its reference count, each slot with its lengths and its
page table. The digest is the sum of the elements' hashes (a multiset hash: order does not matter, and
an element that changes is subtracted and added anew). A page table enters as a chain of hashes, so that
a cut or an append costs what it changes.

Elements are tuples of integers, whose ``hash`` is the same in every process of one Python build (only
strings are salted). It tells mistakes apart, not adversaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.kv.sessions import Slot

MASK = 2**64 - 1


class StateDigest:
    """The digest, and what it has seen of each element."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._value = hash((num_pages, page_size))
        self._refcounts = [0] * num_pages
        self._slots: dict[Slot, _SlotDigest] = {}

    def update(self, refcounts: list[int], touched_pages: Iterable[int], touched_slots: Mapping[Slot, int]) -> int:
        """The digest after what was touched since the last update; 64 bits.

        ``touched_slots``: for each, how many pages at the start of its table are as they were.
        """
        value, seen = self._value, self._refcounts
        for page in touched_pages:
            if seen[page] != refcounts[page]:
                value += hash((page, refcounts[page])) - hash((page, seen[page]))
                seen[page] = refcounts[page]
        for slot, num_kept in touched_slots.items():
            known = self._slots.get(slot)
            if known is None:
                known = self._slots[slot] = _SlotDigest(slot.session_id)
            chain, pages = known.chain, slot.pages
            # A decode seldom changes its table.
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
        self._value = value & MASK
        return self._value

    def drop(self, slot: Slot) -> None:
        """The slot is no more."""
        known = self._slots.pop(slot, None)
        if known is not None:
            self._value -= known.element


class _SlotDigest:
    """What one slot adds to the sum, and the chained hashes of its page table, one for each page."""

    __slots__ = ("chain", "element")

    def __init__(self, session_id: str) -> None:
        name = hashlib.blake2b(session_id.encode(), digest_size=8).digest()
        self.chain = [int.from_bytes(name, "little")]
        self.element = 0
