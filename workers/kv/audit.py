"""The auditor: recounts every page from those who list it, and compares page by page (law L1)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.kv.sessions import SessionCache


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found. ``ok`` means: every page is free or held, with exactly its holders counted."""

    num_pages: int
    num_free: int
    num_cached: int
    num_held: int
    num_slots: int
    num_running: int
    leaked: tuple[int, ...] = ()
    """Pages that count a holder that is not there: they would never be free again."""
    overheld: tuple[int, ...] = ()
    """Pages with more holders than they count: they would be freed under somebody."""
    faults: tuple[str, ...] = field(default=())
    """Everything else that breaks a law, in words."""

    @property
    def ok(self) -> bool:
        return not (self.leaked or self.overheld or self.faults)


def audit(cache: SessionCache) -> AuditReport:
    """Recount from the holders; exact at any moment, with turns running or not. Changes nothing."""
    pool = cache.pool
    holders: Counter[int] = Counter(cache.index.pages())
    for slot in cache.slots.values():
        holders.update(slot.pages)
    holders.update(copy.source for copy in cache.pending_copies)

    leaked = tuple(p for p, count in enumerate(pool.refcounts) if count > holders[p])
    overheld = tuple(p for p, count in enumerate(pool.refcounts) if count < holders[p])
    faults = [*_pool_faults(cache), *_slot_faults(cache)]
    return AuditReport(
        num_pages=pool.num_pages,
        num_free=pool.num_free,
        num_cached=pool.num_cached,
        num_held=pool.num_held,
        num_slots=len(cache.slots),
        num_running=sum(slot.running for slot in cache.slots.values()),
        leaked=leaked,
        overheld=overheld,
        faults=tuple(faults),
    )


def _pool_faults(cache: SessionCache) -> list[str]:
    pool = cache.pool
    free, cached = pool.free_pages(), pool.cached_pages()
    faults = []
    if len(set(free)) != len(free):
        faults.append("a page is on the free list twice")
    if {p for p, count in enumerate(pool.refcounts) if count == 0} != set(free):
        faults.append("the free list and the zero counts differ")
    only_indexed = {p for p in cache.index.pages() if pool.refcounts[p] == 1}
    if only_indexed != set(cached):
        faults.append("the cached list and the pages that only the prefix index holds differ")
    return faults


def _slot_faults(cache: SessionCache) -> list[str]:
    faults = []
    size = cache.page_size
    for slot in cache.slots.values():
        name = f"session {slot.session_id}"
        if not 0 <= slot.committed_len <= slot.allocated_len <= len(slot.pages) * size:
            faults.append(
                f"{name}: lengths out of order: committed {slot.committed_len}, "
                f"allocated {slot.allocated_len}, {len(slot.pages)} pages of {size} (law L5)"
            )
        if len(set(slot.pages)) != len(slot.pages):
            faults.append(f"{name}: a page is in the table twice")
        if len(slot.tokens) < slot.committed_len:
            faults.append(f"{name}: knows {len(slot.tokens)} tokens, committed {slot.committed_len}")
        if len(slot.entries) * size > slot.committed_len:
            faults.append(f"{name}: a page is indexed before it is committed")
        if any(e.page != p for e, p in zip(slot.entries, slot.pages, strict=False)):
            faults.append(f"{name}: an indexed page is not the one in the table")
        if not slot.running and slot.allocated_len != slot.committed_len:
            faults.append(f"{name}: idle with a tail of {slot.allocated_len - slot.committed_len}")
    rows = [slot.row for slot in cache.slots.values()]
    if len(set(rows)) != len(rows):
        faults.append("two slots share a row of the page table")
    return faults
