"""The auditor: recounts every page from its holders and compares page by page (law L1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from workers.kv.page_table import FREED, GroupTables, PageCopy, PageTable
from workers.kv.prefix import PrefixIndex
from workers.kv.scopes import Scopes
from workers.kv.slot import Slot


@dataclass(frozen=True, slots=True)
class GroupAudit:
    """One KV group's pages."""

    name: str
    num_pages: int
    num_free: int
    num_cached: int
    num_held: int
    leaked: tuple[int, ...] = ()
    """Pages with a higher count than holders: they would never be freed."""
    overheld: tuple[int, ...] = ()
    """Pages with more holders than their count: they would be freed while in use."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit. ``ok``: each page is free or held, and its count equals its holders."""

    groups: tuple[GroupAudit, ...]
    num_slots: int
    num_running: int
    faults: tuple[str, ...] = field(default=())
    """Every other violation, as text."""

    @property
    def ok(self) -> bool:
        return not (self.faults or any(group.leaked or group.overheld for group in self.groups))


def audit(
    groups: Sequence[GroupTables],
    index: PrefixIndex,
    slots: Collection[Slot],
    copies: Sequence[PageCopy],
    page_size: int,
    scopes: Scopes,
) -> AuditReport:
    """Recount from the holders; exact at any moment, with or without running turns. Changes nothing."""
    return AuditReport(
        groups=tuple(_group_audit(group, index, slots, copies) for group in groups),
        num_slots=len(slots),
        num_running=sum(slot.running for slot in slots),
        faults=(
            *(fault for group in groups for fault in _pool_faults(group, index)),
            *(fault for group in groups for fault in _share_faults(group, scopes, slots)),
            *_slot_faults(slots, groups, page_size),
            *(fault for slot in slots for fault in _entry_faults(slot, index, page_size)),
        ),
    )


def _group_audit(
    group: GroupTables, index: PrefixIndex, slots: Collection[Slot], copies: Sequence[PageCopy]
) -> GroupAudit:
    pool = group.pool
    holders: Counter[int] = Counter(index.pages(group.index))
    for slot in slots:
        holders.update(page for page in slot.tables[group.index].pages if page != FREED)
    holders.update(copy.source for copy in copies if copy.group == group.index)
    return GroupAudit(
        name=group.name,
        num_pages=pool.num_pages,
        num_free=pool.num_free,
        num_cached=pool.num_cached,
        num_held=pool.num_held,
        leaked=tuple(p for p, count in enumerate(pool.refcounts) if count > holders[p]),
        overheld=tuple(p for p, count in enumerate(pool.refcounts) if count < holders[p]),
    )


def _pool_faults(group: GroupTables, index: PrefixIndex) -> list[str]:
    pool, faults = group.pool, []
    free, cached = pool.free_pages(), pool.cached_pages()
    if len(set(free)) != len(free):
        faults.append(f"{group.name}: a page is on the free list twice")
    if {p for p, count in enumerate(pool.refcounts) if count == 0} != set(free):
        faults.append(f"{group.name}: the free list and the zero counts differ")
    only_indexed = {p for p in index.pages(group.index) if pool.refcounts[p] == 1}
    if only_indexed != set(cached):
        faults.append(f"{group.name}: the cached list and the pages that only the prefix index holds differ")
    return faults


def _share_faults(group: GroupTables, scopes: Scopes, slots: Collection[Slot]) -> list[str]:
    """A page is charged to one scope, the one whose session took it, while it is not free."""
    pool, faults = group.pool, []
    charged = Counter(scope for page in range(pool.num_pages) if (scope := pool.charged_to(page)) is not None)
    for name, pages in ((name, by_group[group.index]) for name, by_group in scopes.pages.items()):
        if pages.num_charged != charged.pop(pages, 0):
            faults.append(f"{group.name}: another number of pages is charged to scope {name} than it counts")
        if list(pages.cached) != [page for page in pool.cached_pages() if pool.charged_to(page) is pages]:
            faults.append(f"{group.name}: the cached pages of scope {name} are others than it lists")
        for slot in slots:
            table = slot.tables[group.index]
            if slot.scope == name and any(pool.charged_to(table.pages[c]) is not pages for c in table.held()):
                faults.append(f"session {slot.session_id}: {group.name}: a page is not charged to scope {name}")
    if charged or any(pool.charged_to(page) is not None for page in pool.free_pages()):
        faults.append(f"{group.name}: a page is charged to nobody that is known, or is free")
    return faults


def _slot_faults(slots: Collection[Slot], groups: Sequence[GroupTables], size: int) -> list[str]:
    faults = []
    for slot in slots:
        name = f"session {slot.session_id}"
        if not 0 <= slot.committed_len <= slot.allocated_len <= slot.reserved_len:
            faults.append(
                f"{name}: lengths out of order: committed {slot.committed_len}, allocated {slot.allocated_len}, "
                f"reserved {slot.reserved_len} (law L5)"
            )
        if len(slot.tokens) < slot.committed_len:
            faults.append(f"{name}: {len(slot.tokens)} tokens, committed {slot.committed_len}")
        if not slot.running and slot.reserved_len != slot.committed_len:
            faults.append(f"{name}: idle with a tail of {slot.reserved_len - slot.committed_len}")
        for group, table in zip(groups, slot.tables, strict=True):
            faults += [f"{name}: {group.name}: {fault}" for fault in _table_faults(slot, group, table, size)]
    rows = [slot.row for slot in slots]
    if len(set(rows)) != len(rows):
        faults.append("two slots share a row of the page tables")
    return faults


def _table_faults(slot: Slot, group: GroupTables, table: PageTable, size: int) -> list[str]:
    """Law L5, for one slot and group."""
    faults, columns = [], table.held()
    held = [table.pages[column] for column in columns]
    reached = slot.allocated_len if group.window else slot.reserved_len
    if reached > len(table.pages) * size:
        faults.append(f"{reached} tokens have {len(table.pages)} pages of {size}")
    if len(set(held)) != len(held):
        faults.append("a page is in the table twice")
    if FREED in held or sum(page != FREED for page in table.pages) != len(held):
        faults.append(f"the pages held are not those of columns {columns}")
    # An import skips what the source's windows had passed before its pages are there and committed.
    passed = slot.allocated_len if slot.running else slot.committed_len
    if table.num_evicted * size > passed:
        faults.append(f"evicted up to {table.num_evicted * size}, committed {slot.committed_len}")
    if group.resumable_len(table, slot.committed_len) != slot.committed_len:
        faults.append(f"the window before {slot.committed_len} is not held")
    if group.window and not slot.running:
        num_points = len({*slot.turn_starts, *((slot.base_len,) if slot.turn_id is not None else ())})
        most = (num_points + 1) * (-(-group.window // size) + 1)
        if len(held) > most:
            faults.append(f"idle with {len(held)} pages, at most {most} are needed")
    if table.digest != sum(hash((column, table.pages[column])) for column in columns):
        faults.append("the digest is not that of the table")
    return faults


def _entry_faults(slot: Slot, index: PrefixIndex, size: int) -> list[str]:
    name, faults = f"session {slot.session_id}", []
    if len(slot.entries) * size > slot.committed_len:
        faults.append(f"{name}: a page is indexed before it is committed")
    for group, table in enumerate(slot.tables):
        for entry, page in zip(slot.entries, table.pages, strict=False):
            if index.entry_of(group, page) not in (None, entry):
                faults.append(f"{name}: page {page} is indexed for other tokens")
    return faults
