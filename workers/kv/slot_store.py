"""The slots of a rank, the pools and the index behind them, and who gives way when pages run out."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from holdfast.errors import OutOfPages, SessionNotFound
from workers.kv.audit import AuditReport, audit
from workers.kv.digest import StateDigest
from workers.kv.groups import GroupSpec, window_pages
from workers.kv.page_table import FREED, GroupTables, PageCopy, PageTable, TableUpdate
from workers.kv.prefix import PrefixIndex, chain_digest
from workers.kv.scopes import KVScope, OutOfShare, ScopePages, Scopes
from workers.kv.slot import Slot

MAX_PAGE_SIZE = 256


class SlotStore:
    """Slots by session, their groups' pools, and their eviction, least recently used first.

    ``groups`` are the model's KV groups with the sizes of their pools, ``max_slots`` bounds the slots (rows of
    the device's page tables). From the starts of a session's last ``num_resume_points`` turns it can be
    resumed although a window has passed them.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        page_size: int,
        max_slots: int = 1024,
        num_resume_points: int = 1,
        digest: Callable[[bytes, bytes], bytes] = chain_digest,
    ) -> None:
        if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of two from 1 to {MAX_PAGE_SIZE}, not {page_size}")
        self.page_size = page_size
        self.pending_copies: list[PageCopy] = []
        """Page copies that the device must make before it writes anything, in order. Each holds a reference
        to its source."""
        self._updates: list[TableUpdate] = []
        self.groups = tuple(
            GroupTables(i, spec, page_size, self._updates, self.pending_copies) for i, spec in enumerate(groups)
        )
        self.windows = tuple(group for group in self.groups if group.window)
        self.scopes = Scopes([group.pool.num_pages for group in self.groups])
        self.index = PrefixIndex(self.groups, digest)
        self.slots: dict[str, Slot] = {}
        self.by_row: dict[int, Slot] = {}
        self._num_resume_points = num_resume_points
        self._free_rows = list(range(max_slots - 1, -1, -1))
        # Slots that could be evicted, least recently used first. Running slots are not in it.
        self._idle: OrderedDict[str, Slot] = OrderedDict()
        configuration = (page_size, num_resume_points, *(n for spec in groups for n in (spec.num_pages, spec.window)))
        self._digest = StateDigest([group.pool for group in self.groups], configuration)
        self._max_touched = 4 * max_slots

    def pages_of_a_turn(self, group: GroupTables, step_tokens: int) -> int:
        """The most pages of a window group that a turn holds while it computes ``step_tokens`` a step."""
        return window_pages(group.window, self.page_size, self._num_resume_points, step_tokens)

    def num_free(self) -> list[int]:
        """Free pages, by group."""
        return [group.pool.num_free for group in self.groups]

    def audit(self) -> AuditReport:
        """Recount every page from its holders. Changes nothing, and is exact while turns run."""
        return audit(self.groups, self.index, self.slots.values(), self.pending_copies, self.page_size, self.scopes)

    def digest(self) -> int:
        """A 64-bit digest of page tables, reference counts and lengths. Costs O(changes since the last call)."""
        return self._digest.update()

    # ---- for the operations -------------------------------------------------------------------

    def _slot(self, session_id: str) -> Slot:
        slot = self.slots.get(session_id)
        if slot is None:
            raise SessionNotFound(f"session {session_id} has no slot here; open it first")
        return slot

    def _new_slot(
        self, session_id: str, tenant: str, scope: str, *, ephemeral: bool = False, spared: Slot | None = None
    ) -> Slot:
        """A new slot, for which an idle one other than ``spared`` may be evicted."""
        if not self._free_rows:
            self._evict_for_a_row(spared)
        if self._digest.num_touched >= self._max_touched:
            self.digest()  # bounds the touched slots where nobody else asks for the digest
        row = self._free_rows.pop()
        tables = [PageTable(row, charged_to=pages) for pages in self.scopes.of(scope)]
        slot = Slot(session_id, tenant, scope, row, ephemeral, tables)
        self.slots[session_id] = self.by_row[row] = slot
        self._idle[session_id] = slot
        self._digest.touch(slot)
        return slot

    def _resumable_len(self, slot: Slot, wanted_len: int) -> int:
        """The greatest length, at most ``wanted_len``, from which every group can resume (law L5)."""
        length = wanted_len
        for group in self.windows:
            table = slot.tables[group.index]
            if (length - group.window + 1) // self.page_size < table.num_evicted:
                length = group.resumable_len(table, length)
        # What a later group cut to must suit the earlier ones too.
        return length if length == wanted_len or len(self.windows) == 1 else self._resumable_len(slot, length)

    def _cut(self, slot: Slot, keep_len: int) -> int:
        """Cut KV to ``keep_len`` tokens and free the tail. The only place that shortens a slot's KV.

        Returns how many pages became free.
        """
        kept_len, num_freed = slot.committed_len, 0
        if keep_len < kept_len:
            kept_len = self._resumable_len(slot, keep_len) if self.windows else keep_len
        if slot.reserved_len != kept_len:
            num_kept = -(-kept_len // self.page_size)
            for group in self.groups:
                num_freed += group.cut(slot.tables[group.index], num_kept)
            slot.committed_len = slot.allocated_len = slot.reserved_len = kept_len
            del slot.entries[kept_len // self.page_size :]
        self._digest.touch(slot)
        return num_freed

    def _slide(self, slot: Slot) -> int:
        """Free what was held for resume points that are none any more. Returns how many pages became free.

        Where the points are the same there is nothing to do: ``commit`` has slid the windows already.
        """
        points = slot.turn_starts
        if slot.turn_id is not None and slot.base_len not in points:
            points = (*points, slot.base_len)
        if points == slot.protected_points:
            return 0
        slot.protected_points, num_freed = points, 0
        for group in self.windows:
            table = slot.tables[group.index]
            num_freed += group.protect(table, points) + group.slide(table, slot.committed_len)
        return num_freed

    def _set_share(self, scope: KVScope) -> None:
        """The scope has this share from now on. What it holds already is charged to it the first time."""
        if not self.scopes.is_new(scope) or not self.scopes.set_share(scope):
            return
        for group, pages in zip(self.groups, self.scopes.pages[scope.name], strict=True):
            for slot in [slot for slot in self.slots.values() if slot.scope == scope.name]:
                table = slot.tables[group.index]
                table.charged_to = pages
                group.pool.charge([page for page in table.pages if page != FREED], pages)
            group.pool.charge(self.index.pages_of(scope.name, group.index), pages)
            group.pool.list_cached(pages)

    def _make_room(self, slot: Slot, wanted: Sequence[tuple[GroupTables, int]]) -> None:
        """Evict until each group has that many free pages, or raise OutOfPages and change nothing.

        Raises OutOfShare if the slot's scope is beyond its share then, and pages that it may have do not suffice.
        """
        beyond = set()
        if self.scopes:
            beyond = {group for group, count in wanted if self._check_share(slot, group, count)}
        if any(count > group.pool.num_free + group.pool.num_cached for group, count in wanted):
            for group, count in wanted:
                self._require_evictable(group, count)
        for group, count in wanted:
            while group.pool.num_free < count:
                if self.scopes and self._evict_beyond_share(slot, group, count):
                    continue
                may_evict = group not in beyond
                if not may_evict or (not self.index.evict_oldest(group.index) and not self._evict_oldest_idle()):
                    raise AssertionError("fewer pages could be evicted than were counted")

    def _check_share(self, slot: Slot, group: GroupTables, count: int) -> bool:
        """Whether the slot's scope is beyond its share with ``count`` pages more, and all its idle ones evicted.

        Raises OutOfShare if it then gets too few: those that are free, its own, and what others hold beyond theirs.
        """
        own, pool = slot.tables[group.index].charged_to, group.pool
        if own is None or count <= pool.num_free or own.excess + count <= 0:
            return False
        pinned = self._pinned_by_scope(group)
        if pinned[own] + count <= own.limit:
            return False
        available = pool.num_free + own.num_charged - pinned[own]
        for pages in self.scopes.over(group.index):
            if pages is not own:
                available += min(pages.excess, pages.num_charged - pinned[pages])
        if available < count:
            raise OutOfShare(
                f"{count} pages of the {group.name} group are needed beyond a share of {own.limit}, {available} are "
                "not in use by running turns, nor within another share"
            )
        return True

    def _evict_beyond_share(self, slot: Slot, group: GroupTables, count: int) -> bool:
        """Evict the oldest of the scope that is farthest beyond its share of a group. False if there is none.

        The slot's own scope counts as if it had ``count`` pages more.
        """
        own = slot.tables[group.index].charged_to
        excess = [
            (pages[group.index].excess + (count if pages[group.index] is own else 0), name)
            for name, pages in self.scopes.pages.items()
        ]
        for by, name in sorted(excess, key=lambda each: -each[0]):
            if by > 0 and (
                self.index.evict_oldest(group.index, self.scopes.pages[name][group.index])
                or self._evict_oldest_idle(name)
            ):
                return True
        return False

    def scopes_beyond_share(self, needy: str = "") -> set[str]:
        """The scopes whose running turns hold more than their share of some group; ``needy``, with a page more."""
        beyond = set()
        for group in self.groups if self.scopes else ():
            pinned = self._pinned_by_scope(group)
            for name, pages in self.scopes.pages.items():
                if pinned[pages[group.index]] + (name == needy) > pages[group.index].limit:
                    beyond.add(name)
        return beyond

    def _pinned_by_scope(self, group: GroupTables) -> Counter[ScopePages | None]:
        return Counter(map(group.pool.charged_to, self._pinned(group)))

    def _pinned(self, group: GroupTables) -> set[int]:
        """The pages of running turns and pending copies: they cannot be evicted."""
        pinned = {copy.source for copy in self.pending_copies if copy.group == group.index}
        for slot in self.slots.values():
            if slot.running:
                pinned.update(slot.tables[group.index].pages)
        pinned.discard(FREED)
        return pinned

    def _require_evictable(self, group: GroupTables, count: int) -> None:
        # Exact: every page that is not pinned can be evicted. Counted only when free and cached pages do not suffice,
        # because it costs O(pages of running turns).
        available = group.pool.num_pages - len(self._pinned(group))
        if available < count:
            raise OutOfPages(
                f"{count} pages of the {group.name} group are needed, {available} of {group.pool.num_pages} "
                "are not in use by running turns"
            )

    def _evict_oldest_idle(self, scope: str | None = None) -> bool:
        """Evict the least recently used idle slot (of a scope). False if none is idle."""
        idle = self._idle.values()
        oldest = next(iter(idle) if scope is None else (slot for slot in idle if slot.scope == scope), None)
        if oldest is None:
            return False
        self._evict(oldest)
        return True

    def _evict(self, slot: Slot) -> None:
        if slot.turn_id is None:
            self._drop(slot)
            return
        # A retracted turn resumes in this slot and brings all its tokens: only the KV is dropped.
        self._cut(slot, 0)
        del slot.tokens[:]
        del self._idle[slot.session_id]

    def _evict_for_a_row(self, spared: Slot | None = None) -> None:
        victim = next((s for s in self._idle.values() if s.turn_id is None and s is not spared), None)
        if victim is None:
            raise OutOfPages(f"turns own all {len(self.slots)} slots")
        self._evict(victim)

    def _drop(self, slot: Slot) -> None:
        self._cut(slot, 0)
        self._idle.pop(slot.session_id, None)
        del self.slots[slot.session_id], self.by_row[slot.row]
        self._digest.drop(slot)
        self._free_rows.append(slot.row)
