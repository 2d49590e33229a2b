"""The auditor: recounts every page from its holders and compares page by page (law L1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from workers.kv.page_table import PageCopy
from workers.kv.pages import PagePool
from workers.kv.prefix import PrefixIndex
from workers.kv.slot import Slot


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit. ``ok``: each page is free or held, and its count equals its holders."""

    num_pages: int
    num_free: int
    num_cached: int
    num_held: int
    num_slots: int
    num_running: int
    leaked: tuple[int, ...] = ()
    """Pages with a higher count than holders: they would never be freed."""
    overheld: tuple[int, ...] = ()
    """Pages with more holders than their count: they would be freed while in use."""
    faults: tuple[str, ...] = field(default=())
    """Every other violation, as text."""

    @property
    def ok(self) -> bool:
        return not (self.leaked or self.overheld or self.faults)


def audit(
    pool: PagePool, index: PrefixIndex, slots: Collection[Slot], copies: Sequence[PageCopy], page_size: int
) -> AuditReport:
    """Recount from the holders; exact at any moment, with or without running turns. Changes nothing."""
    holders: Counter[int] = Counter(index.pages())
    for slot in slots:
        holders.update(slot.pages)
    holders.update(copy.source for copy in copies)
    return AuditReport(
        num_pages=pool.num_pages,
        num_free=pool.num_free,
        num_cached=pool.num_cached,
        num_held=pool.num_held,
        num_slots=len(slots),
        num_running=sum(slot.running for slot in slots),
        leaked=tuple(p for p, count in enumerate(pool.refcounts) if count > holders[p]),
        overheld=tuple(p for p, count in enumerate(pool.refcounts) if count < holders[p]),
        faults=(*_pool_faults(pool, index), *_slot_faults(slots, page_size)),
    )


def _pool_faults(pool: PagePool, index: PrefixIndex) -> list[str]:
    free, cached = pool.free_pages(), pool.cached_pages()
    faults = []
    if len(set(free)) != len(free):
        faults.append("a page is on the free list twice")
    if {p for p, count in enumerate(pool.refcounts) if count == 0} != set(free):
        faults.append("the free list and the zero counts differ")
    only_indexed = {p for p in index.pages() if pool.refcounts[p] == 1}
    if only_indexed != set(cached):
        faults.append("the cached list and the pages that only the prefix index holds differ")
    return faults


def _slot_faults(slots: Collection[Slot], size: int) -> list[str]:
    faults = []
    for slot in slots:
        name = f"session {slot.session_id}"
        if not 0 <= slot.committed_len <= slot.allocated_len <= len(slot.pages) * size:
            faults.append(
                f"{name}: lengths out of order: committed {slot.committed_len}, "
                f"allocated {slot.allocated_len}, {len(slot.pages)} pages of {size} (law L5)"
            )
        if len(set(slot.pages)) != len(slot.pages):
            faults.append(f"{name}: a page is in the table twice")
        if len(slot.tokens) < slot.committed_len:
            faults.append(f"{name}: {len(slot.tokens)} tokens, committed {slot.committed_len}")
        if len(slot.entries) * size > slot.committed_len:
            faults.append(f"{name}: a page is indexed before it is committed")
        if any(e.page != p for e, p in zip(slot.entries, slot.pages, strict=False)):
            faults.append(f"{name}: an indexed page is not the one in the table")
        if not slot.running and slot.allocated_len != slot.committed_len:
            faults.append(f"{name}: idle with a tail of {slot.allocated_len - slot.committed_len}")
    rows = [slot.row for slot in slots]
    if len(set(rows)) != len(rows):
        faults.append("two slots share a row of the page table")
    return faults
