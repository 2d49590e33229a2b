"""Sessions' slots: page tables that live from turn to turn, and the few operations that change them.

A slot's positions, in half-open ranges (page_size 4, pages A B C D)::

        A       B       C       D
    |. . . .|. . . .|. . . .|. . . .|
     [0, committed_len)  KV computed and valid
                     [committed_len, allocated_len)  the tail: pages held, KV not valid
     tokens may reach past committed_len: known, KV not yet computed (the last sampled token)

All of this is a pure function of the calls made: no clock, no randomness, no I/O, and nothing depends
on the order of a set. Ranks that make the same calls hold the same state (law L8).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from holdfast.errors import InvalidRequest, OutOfPages, SessionBusy, SessionExists, SessionNotFound
from workers.kv.audit import AuditReport, audit
from workers.kv.digest import StateDigest
from workers.kv.pages import PagePool
from workers.kv.prefix import PrefixEntry, PrefixIndex, chain_digest

MAX_PAGE_SIZE = 256


class Outcome(Enum):
    """How a turn ended, as far as its KV is concerned (law L7)."""

    COMPLETED = "completed"
    """The session keeps what was computed: stopped, or reached its length."""
    ABORTED = "aborted"
    """The session goes back to its last good turn: client gone, error, release."""
    RETRACTED = "retracted"
    """The turn gives its place back and will return; its KV stays while there is room."""


class PageCopy(NamedTuple):
    """Copy page ``source`` to page ``target`` before anything of this step is written (copy on write)."""

    source: int
    target: int


class TableUpdate(NamedTuple):
    """Entry ``column`` of row ``row`` of the device's page tables becomes ``page``."""

    row: int
    column: int
    page: int


def new_tokens(values: Sequence[int] = ()) -> array[int]:
    """Token ids as the core keeps them: 32-bit, contiguous, comparable and hashable as bytes."""
    return array("i", values)


@dataclass(slots=True, eq=False)
class Slot:
    """What one session (or one plain request) holds on this rank."""

    session_id: str
    tenant: str
    row: int
    """Row of the device's page tables; the slot's as long as the slot lives."""
    ephemeral: bool
    """A plain request: the slot goes with its turn."""
    pages: list[int] = field(default_factory=list)
    entries: list[PrefixEntry] = field(default_factory=list)
    """Pages [0, len(entries)) are in the prefix index, by these entries."""
    tokens: array[int] = field(default_factory=new_tokens)
    committed_len: int = 0
    allocated_len: int = 0
    turn_id: str | None = None
    """The turn that owns the slot: running, or retracted and waiting to return."""
    running: bool = False
    base_len: int = 0
    """How many tokens the session had when its turn began: where an abort goes back to."""


class SessionCache:
    """The slots of one rank, and the pool and prefix index that they share.

    ``max_slots`` bounds the slots (rows of the device's page tables), ``num_pages`` the pages.
    Operations raise before they change anything.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_slots: int = 1024,
        digest: Callable[[bytes, bytes], bytes] = chain_digest,
    ) -> None:
        if not 1 <= page_size <= MAX_PAGE_SIZE or page_size & (page_size - 1):
            raise ValueError(f"page_size must be a power of two from 1 to {MAX_PAGE_SIZE}, not {page_size}")
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.index = PrefixIndex(self.pool, digest)
        self.slots: dict[str, Slot] = {}
        self.by_row: dict[int, Slot] = {}
        self.pending_copies: list[PageCopy] = []
        self._table_updates: list[TableUpdate] = []
        self._free_rows = list(range(max_slots - 1, -1, -1))
        # Slots that could be evicted, least recently used first. Running slots are not in it.
        self._idle: OrderedDict[str, Slot] = OrderedDict()
        self._digest = StateDigest(num_pages, page_size)
        # Slots that changed since the digest was taken, and how much of their tables is as it was.
        self._touched: dict[Slot, int] = {}
        self._max_touched = 4 * max_slots

    # ---- what a turn goes through ------------------------------------------------------------

    def open(self, session_id: str, tenant: str = "", *, ephemeral: bool = False) -> Slot:
        """The session's slot, made empty if there is none. Opening again changes nothing.

        Raises SessionExists if another tenant has a session of that id, OutOfPages if every slot is
        taken by a turn.
        """
        slot = self.slots.get(session_id)
        if slot is not None:
            if slot.tenant != tenant:
                raise SessionExists(f"session {session_id} belongs to another tenant")
            return slot
        return self._new_slot(session_id, tenant, ephemeral=ephemeral)

    def resume(
        self, session_id: str, turn_id: str, tokens: array[int], keep_len: int, *, match_prefix: bool = True
    ) -> int:
        """Begin (or, after a retract, go on with) a turn whose whole input is ``tokens``.

        ``keep_len`` says how many of them the session has already; the slot is cut to that
        (``free_tail``), and to one less than ``len(tokens)``: the last token is always computed, for
        its logits start the output. Pages of a prefix that others computed are taken from the index,
        unless ``match_prefix`` is off.
        Nothing is allocated. Again with the same turn changes nothing (law L6).

        Returns the number of tokens whose KV need not be computed.
        Raises SessionNotFound, SessionBusy.
        """
        slot = self._slot(session_id)
        if slot.turn_id is not None and slot.turn_id != turn_id:
            raise SessionBusy(f"session {session_id} is busy with turn {slot.turn_id}; wait or abort it")
        if slot.running:
            return slot.committed_len
        if slot.turn_id is None:
            slot.turn_id = turn_id
            slot.base_len = keep_len
        slot.running = True
        self._touch(slot)
        self._idle.pop(session_id, None)
        del slot.tokens[keep_len:]
        self._cut(slot, min(keep_len, len(tokens) - 1))
        if match_prefix:
            self._take_cached_prefix(slot, tokens)
        return slot.committed_len

    def extend(self, session_id: str, num_tokens: int) -> None:
        """Hold pages for positions up to ``committed_len + num_tokens``, appended past the table's end.

        Evicts cached pages, then idle slots, least recently used first. A shared partial page is
        replaced by a copy before it can be written (law L4). Raises OutOfPages, with nothing changed.
        """
        self._extend(self._slot(session_id), num_tokens)

    def extend_by_one(self, session_ids: Sequence[str]) -> int:
        """``extend`` each by one position, in order, until there is no page for one.

        Returns how many were extended. This is all that most steps do, once for every decoding turn.
        """
        size, refcounts = self.page_size, self.pool.refcounts
        for num_done, session_id in enumerate(session_ids):
            slot = self._slot(session_id)
            at = slot.committed_len
            if at % size and refcounts[slot.pages[at // size]] == 1 and slot.running:
                if slot.allocated_len <= at:
                    slot.allocated_len = at + 1
                self._touch(slot)
                continue
            try:
                self._extend(slot, 1)
            except OutOfPages:
                return num_done
        return len(session_ids)

    def _extend(self, slot: Slot, num_tokens: int) -> None:
        assert slot.running, f"session {slot.session_id} has no running turn to extend"
        size, wanted_len = self.page_size, slot.committed_len + num_tokens
        num_new = max(0, -(-wanted_len // size) - len(slot.pages))
        copy_on_write = (
            slot.committed_len % size != 0 and self.pool.refcounts[slot.pages[slot.committed_len // size]] > 1
        )
        if num_new + copy_on_write:
            self._reserve(num_new + copy_on_write)
        if copy_on_write:
            # The pending copy takes over the slot's reference to the old page until it is done.
            assert len(slot.pages) == slot.committed_len // size + 1, "a shared page lies inside a table"
            shared = slot.pages.pop()
            self._touch(slot)
            self._append_page(slot, copied_from=shared)
        for _ in range(num_new):
            self._append_page(slot)
        slot.allocated_len = max(slot.allocated_len, wanted_len)
        self._touch(slot)

    def commit(self, computed: Mapping[str, array[int]]) -> None:
        """The KV of these tokens, at each session's next positions, is computed. Pages that fill up are indexed."""
        for session_id, tokens in computed.items():
            self._commit(self._slot(session_id), tokens)

    def _commit(self, slot: Slot, tokens: array[int]) -> None:
        start, end = slot.committed_len, slot.committed_len + len(tokens)
        assert slot.running, f"session {slot.session_id} has no running turn to commit to"
        assert end <= slot.allocated_len, f"commit to {end} past the allocated {slot.allocated_len}"
        if end > len(slot.tokens):
            del slot.tokens[start:]
            slot.tokens.extend(tokens)
        else:
            slot.tokens[start:end] = tokens
        slot.committed_len = end
        self._touch(slot)
        if end // self.page_size > start // self.page_size:
            self._index_full_pages(slot)

    def finish(self, session_id: str, turn_id: str, outcome: Outcome, known: array[int] | None = None) -> None:
        """End a turn, whatever ended it: the one way out (law L7). Again, or unknown: nothing happens.

        ``known``: tokens that belong to the session past what is committed (the last sampled token,
        whose KV the next turn computes); with COMPLETED only.
        """
        slot = self.slots.get(session_id)
        if slot is None or slot.turn_id != turn_id:
            return
        if outcome is Outcome.ABORTED:
            del slot.tokens[slot.base_len :]
        elif outcome is Outcome.COMPLETED:
            del slot.tokens[slot.committed_len :]
            slot.tokens.extend(known or ())
        self._cut(slot, min(slot.committed_len, len(slot.tokens)))
        slot.running = False
        if outcome is not Outcome.RETRACTED:
            slot.turn_id = None
            if slot.ephemeral:
                self._drop(slot)
                return
        self._idle[session_id] = slot
        self._idle.move_to_end(session_id)

    # ---- what the control plane asks for -----------------------------------------------------

    def free_tail(self, session_id: str, keep_len: int) -> int:
        """Cut an idle session to its first ``keep_len`` tokens. Returns the pages that became free.

        Frees whole pages from ``ceil(keep_len / page_size)`` on (law L3); again changes nothing (L6).
        Raises SessionNotFound, SessionBusy, InvalidRequest if ``keep_len`` is negative.
        """
        slot = self._slot(session_id)
        if keep_len < 0:
            raise InvalidRequest(f"keep_len must not be negative, got {keep_len}")
        if slot.turn_id is not None:
            raise SessionBusy(f"session {session_id} is busy with turn {slot.turn_id}; wait or abort it")
        del slot.tokens[keep_len:]
        return self._cut(slot, keep_len)

    def release_session(self, session_id: str) -> int:
        """Forget a session. Returns the pages that became free; 0 if nothing is left of it (law L6).

        Its pages leave the prefix index too, with every branch that it rewound or aborted, but for
        those that another session has used.
        Raises SessionBusy: the caller ends the turn first, through ``finish``.
        """
        slot, free_before = self.slots.get(session_id), self.pool.num_free
        if slot is not None:
            if slot.turn_id is not None:
                raise SessionBusy(f"session {session_id} is busy with turn {slot.turn_id}; wait or abort it")
            self._drop(slot)
        # Also of a session whose slot was evicted: its pages may be cached still.
        self.index.remove_owned(session_id)
        return self.pool.num_free - free_before

    def fork(self, parent_id: str, child_id: str, at_len: int | None = None, *, for_reading: bool = False) -> Slot:
        """A new session that begins as the first ``at_len`` tokens of ``parent_id``, sharing its pages.

        Default: all the parent has, as of its last good turn. A running parent writes into its partial
        page, so only its full pages are shared then, and the child computes the rest again.
        ``for_reading``: the child will not go on; its parent's pages in the index stay its parent's alone.
        Raises SessionNotFound, SessionExists, InvalidRequest, OutOfPages (no slot is free).
        """
        parent = self._slot(parent_id)
        known_len = parent.base_len if parent.turn_id is not None else len(parent.tokens)
        known_len = min(known_len, len(parent.tokens))
        at_len = known_len if at_len is None else at_len
        if not 0 <= at_len <= known_len:
            raise InvalidRequest(f"session {parent_id} has {known_len} tokens, cannot fork it at {at_len}")
        if child_id in self.slots:
            raise SessionExists(f"session {child_id} is there already")
        child = self._new_slot(child_id, parent.tenant, spared=parent)
        if parent_id in self._idle:
            self._idle.move_to_end(parent_id)
        size = self.page_size
        shared_len = min(at_len, parent.committed_len)
        if parent.running:
            shared_len -= shared_len % size
        child.tokens = parent.tokens[:at_len]
        if not for_reading:
            child.entries = parent.entries[: shared_len // size]
            for entry in child.entries:
                entry.shared = True
        for page in parent.pages[: -(-shared_len // size)]:
            self.pool.incref(page)
            self._put_page(child, page)
        child.committed_len = child.allocated_len = shared_len
        return child

    # ---- what the engine takes each step -----------------------------------------------------

    def take_table_updates(self) -> list[TableUpdate]:
        """Changes to the device's page tables since the last call, in order."""
        updates, self._table_updates = self._table_updates, []
        return updates

    def finish_copies(self, count: int) -> None:
        """The first ``count`` pending copies are done (or queued before any later write)."""
        done, self.pending_copies = self.pending_copies[:count], self.pending_copies[count:]
        for copy in done:
            self.pool.decref(copy.source)

    def flush(self) -> None:
        """Drop every idle slot and every cached page (running turns keep theirs)."""
        while self._evict_oldest_idle():
            pass
        while self.index.evict_oldest():
            pass

    def audit(self) -> AuditReport:
        return audit(self)

    def digest(self) -> int:
        """64 bits that differ where page tables, reference counts or lengths do. O(changes since the last)."""
        value = self._digest.update(self.pool.refcounts, self.pool.touched, self._touched)
        self.pool.touched.clear()
        self._touched.clear()
        return value

    # ---- inside --------------------------------------------------------------------------------

    def _slot(self, session_id: str) -> Slot:
        slot = self.slots.get(session_id)
        if slot is None:
            raise SessionNotFound(f"session {session_id} has no slot here; open it first")
        return slot

    def _touch(self, slot: Slot) -> None:
        num_kept = len(slot.pages)
        if self._touched.get(slot, num_kept) >= num_kept:
            self._touched[slot] = num_kept

    def _new_slot(self, session_id: str, tenant: str, *, ephemeral: bool = False, spared: Slot | None = None) -> Slot:
        """``spared``: a slot that must not be the one that makes room."""
        if not self._free_rows:
            self._evict_for_a_row(spared)
        if len(self._touched) >= self._max_touched:
            self.digest()  # so that what was touched stays bounded where nobody asks for the digest
        slot = Slot(session_id, tenant, self._free_rows.pop(), ephemeral)
        self.slots[session_id] = self.by_row[slot.row] = slot
        self._idle[session_id] = slot
        self._touch(slot)
        return slot

    def _cut(self, slot: Slot, keep_len: int) -> int:
        """Cut KV to ``keep_len`` and give back the tail: the only place that shortens a page table."""
        size, num_freed = self.page_size, 0
        slot.committed_len = min(slot.committed_len, keep_len)
        slot.allocated_len = slot.committed_len
        num_kept = -(-slot.committed_len // size)
        if self.pending_copies and len(slot.pages) > num_kept:
            self._cancel_copies(slot.pages[num_kept:])
        while len(slot.pages) > num_kept:
            num_freed += self.pool.decref(slot.pages.pop())
        self._touch(slot)
        del slot.entries[slot.committed_len // size :]
        return num_freed

    def _cancel_copies(self, targets: list[int]) -> None:
        # A page that is given back must not be written any more: it may be another's by then.
        for copy in [c for c in self.pending_copies if c.target in targets]:
            self.pending_copies.remove(copy)
            self.pool.decref(copy.source)

    def _take_cached_prefix(self, slot: Slot, tokens: array[int]) -> None:
        size = self.page_size
        if slot.committed_len != len(slot.entries) * size:
            return  # a partial or private page is in the way, and tables are never rewritten (L2)
        entry = slot.entries[-1] if slot.entries else self.index.root(slot.tenant)
        while slot.committed_len + size < len(tokens):
            start = slot.committed_len
            page_tokens = tokens[start : start + size]
            found = self.index.find(entry, page_tokens)
            if found is None:
                return
            entry = found
            entry.shared |= entry.owner != slot.session_id
            self.pool.incref(entry.page)
            self._put_page(slot, entry.page)
            slot.entries.append(entry)
            del slot.tokens[start:]
            slot.tokens.extend(page_tokens)
            slot.committed_len = slot.allocated_len = start + size

    def _index_full_pages(self, slot: Slot) -> None:
        size = self.page_size
        parent = slot.entries[-1] if slot.entries else self.index.root(slot.tenant)
        while (start := len(slot.entries) * size) + size <= slot.committed_len:
            page = slot.pages[len(slot.entries)]
            entry = self.index.add(parent, slot.tokens[start : start + size], page, slot.session_id)
            if entry is None:
                return
            slot.entries.append(entry)
            parent = entry

    def _append_page(self, slot: Slot, copied_from: int | None = None) -> None:
        page = self.pool.take_free()
        assert page is not None, "pages were reserved"
        self._put_page(slot, page)
        if copied_from is not None:
            self.pending_copies.append(PageCopy(copied_from, page))

    def _put_page(self, slot: Slot, page: int) -> None:
        self._table_updates.append(TableUpdate(slot.row, len(slot.pages), page))
        slot.pages.append(page)

    def _reserve(self, num_pages: int) -> None:
        """Make at least ``num_pages`` pages free, or raise OutOfPages with nothing changed."""
        if self.pool.num_free >= num_pages:
            return
        if num_pages > self.pool.num_free + self.pool.num_cached:
            self._require_evictable(num_pages)
        while self.pool.num_free < num_pages:
            if not self.index.evict_oldest() and not self._evict_oldest_idle():
                raise AssertionError("evictable pages were counted, but are not there")

    def _require_evictable(self, num_pages: int) -> None:
        # Exact: what is not listed by a running slot or a pending copy can be evicted. Counted only
        # when free and cached pages do not suffice, for it costs O(running turns' pages).
        pinned = {copy.source for copy in self.pending_copies}
        for slot in self.slots.values():
            if slot.running:
                pinned.update(slot.pages)
        if self.pool.num_pages - len(pinned) < num_pages:
            raise OutOfPages(
                f"{num_pages} pages are needed, {self.pool.num_pages - len(pinned)} of "
                f"{self.pool.num_pages} are not in use by running turns"
            )

    def _evict_oldest_idle(self) -> bool:
        """Drop the least recently used idle slot's pages, if any slot is idle."""
        oldest = next(iter(self._idle.values()), None)
        if oldest is None:
            return False
        self._evict(oldest)
        return True

    def _evict(self, slot: Slot) -> None:
        if slot.turn_id is None:
            self._drop(slot)
            return
        # A retracted turn will come back to this slot, with all its tokens: only the KV goes.
        self._cut(slot, 0)
        del slot.tokens[:]
        del self._idle[slot.session_id]

    def _evict_for_a_row(self, spared: Slot | None = None) -> None:
        victim = next((s for s in self._idle.values() if s.turn_id is None and s is not spared), None)
        if victim is None:
            raise OutOfPages(f"all {len(self.slots)} slots are taken by turns")
        self._evict(victim)

    def _drop(self, slot: Slot) -> None:
        self._cut(slot, 0)
        self._idle.pop(slot.session_id, None)
        del self.slots[slot.session_id], self.by_row[slot.row]
        self._touched.pop(slot, None)
        self._digest.drop(slot)
        self._free_rows.append(slot.row)
