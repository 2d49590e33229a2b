"""The session cache: slots that live from turn to turn, and the few operations that change them.

Everything here is a pure function of the calls made: no clock, no randomness, no I/O, and nothing
depends on the order of a set. Ranks that make the same calls hold the same state (law L8).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from holdfast.errors import InvalidRequest, OutOfPages, SessionBusy, SessionExists, SessionNotFound
from workers.kv.audit import AuditReport, audit
from workers.kv.digest import StateDigest
from workers.kv.page_table import PageCopy, PageTables, TableUpdate
from workers.kv.pages import PagePool
from workers.kv.prefix import PrefixIndex, chain_digest
from workers.kv.slot import Outcome, Slot

MAX_PAGE_SIZE = 256


class SessionCache:
    """The slots of one rank, and the pool and prefix index that they share.

    ``max_slots`` bounds the slots (rows of the device's page tables), ``num_pages`` the pages.
    Operations check before they change anything.
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
        self._tables = PageTables(self.pool)
        self._free_rows = list(range(max_slots - 1, -1, -1))
        # Slots that could be evicted, least recently used first. Running slots are not in it.
        self._idle: OrderedDict[str, Slot] = OrderedDict()
        self._digest = StateDigest(num_pages, page_size)
        self._max_touched = 4 * max_slots

    # ---- a turn's operations, in order --------------------------------------------------------

    def open(self, session_id: str, tenant: str = "", *, ephemeral: bool = False) -> Slot:
        """The session's slot; a new, empty one if it has none. Idempotent.

        Raises SessionExists if another tenant has a session of that id, OutOfPages if turns own all slots.
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
        """Begin a turn whose whole input is ``tokens``, or resume it after a retract.

        The session has the first ``keep_len`` of them; the slot is cut to that (``free_tail``), and to at
        most ``len(tokens) - 1``: the last token is always computed, because its logits start the output.
        With ``match_prefix``, pages of a prefix that other sessions computed are shared from the index.
        Allocates nothing. Idempotent for the same turn (law L6).

        Returns the number of leading tokens whose KV is present.
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
        self._digest.touch(slot)
        self._idle.pop(session_id, None)
        del slot.tokens[keep_len:]
        self._cut(slot, min(keep_len, len(tokens) - 1))
        if match_prefix:
            self._take_cached_prefix(slot, tokens)
        return slot.committed_len

    def extend(self, session_id: str, num_tokens: int) -> None:
        """Append pages for positions up to ``committed_len + num_tokens``.

        Evicts cached pages, then idle slots, least recently used first. A shared partial page is
        replaced by a copy before it can be written (law L4). Raises OutOfPages and changes nothing then.
        """
        self._extend(self._slot(session_id), num_tokens)

    def extend_by_one(self, session_ids: Sequence[str]) -> int:
        """``extend`` each session by one position, in order, until no page is left.

        Returns how many were extended. Decoding turns cost a step just this call.
        """
        size, refcounts, touch = self.page_size, self.pool.refcounts, self._digest.touch
        for num_done, session_id in enumerate(session_ids):
            slot = self._slot(session_id)
            at = slot.committed_len
            if at % size and refcounts[slot.pages[at // size]] == 1 and slot.running:
                if slot.allocated_len <= at:
                    slot.allocated_len = at + 1
                touch(slot)
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
            assert len(slot.pages) == slot.committed_len // size + 1, "a shared page lies inside a table"
            self._tables.copy_last_page(slot)
            self._digest.touch(slot, len(slot.pages) - 1)
        if num_new:
            self._tables.append_free(slot, num_new)
        slot.allocated_len = max(slot.allocated_len, wanted_len)
        self._digest.touch(slot)

    def commit(self, computed: Mapping[str, array[int]]) -> None:
        """Mark the KV of these tokens, at each session's next positions, as computed; index pages that fill up."""
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
        self._digest.touch(slot)
        if end // self.page_size > start // self.page_size:
            self._index_full_pages(slot)

    def finish(self, session_id: str, turn_id: str, outcome: Outcome, known: array[int] | None = None) -> None:
        """End a turn, whatever ended it: the one way out (law L7). Idempotent; an unknown turn is ignored.

        ``known``, with COMPLETED only: the session's tokens past ``committed_len`` (the last sampled
        token, whose KV the next turn computes).
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

    # ---- control plane -----------------------------------------------------------------------

    def free_tail(self, session_id: str, keep_len: int) -> int:
        """Cut an idle session to its first ``keep_len`` tokens. Returns the number of pages freed.

        Frees whole pages from ``ceil(keep_len / page_size)`` on (law L3). Idempotent (L6).
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
        """Drop a session. Returns the number of pages freed; 0 if nothing is left of it (law L6).

        Its pages leave the prefix index too, including the branches it rewound or aborted, except
        pages that another session has used.
        Raises SessionBusy: the caller ends the turn first, with ``finish``.
        """
        slot, free_before = self.slots.get(session_id), self.pool.num_free
        if slot is not None:
            if slot.turn_id is not None:
                raise SessionBusy(f"session {session_id} is busy with turn {slot.turn_id}; wait or abort it")
            self._drop(slot)
        # Even if the slot was evicted before: the session's pages may still be cached.
        self.index.remove_owned(session_id)
        return self.pool.num_free - free_before

    def fork(self, parent_id: str, child_id: str, at_len: int | None = None, *, for_reading: bool = False) -> Slot:
        """A new session with the first ``at_len`` tokens of ``parent_id``, sharing its pages.

        Default: all of the parent, as of its last good turn. A running parent still writes into its
        partial page, so only its full pages are shared and the child computes the rest again.
        ``for_reading``: the child runs no turn; the parent stays the only owner of its index entries.
        Raises SessionNotFound, SessionExists, InvalidRequest, OutOfPages (no slot is free).
        """
        parent = self._slot(parent_id)
        known_len = parent.base_len if parent.turn_id is not None else len(parent.tokens)
        known_len = min(known_len, len(parent.tokens))
        at_len = known_len if at_len is None else at_len
        if not 0 <= at_len <= known_len:
            raise InvalidRequest(f"session {parent_id} has {known_len} tokens, cannot fork it at {at_len}")
        if child_id in self.slots:
            raise SessionExists(f"session {child_id} exists already")
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
            self._tables.append_shared(child, page)
        child.committed_len = child.allocated_len = shared_len
        return child

    # ---- the engine's side of a step ---------------------------------------------------------

    @property
    def pending_copies(self) -> list[PageCopy]:
        """Page copies that the device must make before it writes anything, in order."""
        return self._tables.pending_copies

    def take_table_updates(self) -> list[TableUpdate]:
        """Changes to the device's page tables since the last call, in order."""
        return self._tables.take_updates()

    def finish_copies(self, count: int) -> None:
        """The device has made the first ``count`` pending copies (or queued them before any later write)."""
        self._tables.finish_copies(count)

    def flush(self) -> None:
        """Drop all idle slots and cached pages; running turns keep theirs."""
        while self._evict_oldest_idle():
            pass
        while self.index.evict_oldest():
            pass

    def audit(self) -> AuditReport:
        """Recount every page from its holders. Changes nothing, and is exact while turns run."""
        return audit(self.pool, self.index, self.slots.values(), self.pending_copies, self.page_size)

    def digest(self) -> int:
        """A 64-bit digest of page tables, reference counts and lengths. Costs O(changes since the last call)."""
        value = self._digest.update(self.pool.refcounts, self.pool.touched)
        self.pool.touched.clear()
        return value

    # ---- inside --------------------------------------------------------------------------------

    def _slot(self, session_id: str) -> Slot:
        slot = self.slots.get(session_id)
        if slot is None:
            raise SessionNotFound(f"session {session_id} has no slot here; open it first")
        return slot

    def _new_slot(self, session_id: str, tenant: str, *, ephemeral: bool = False, spared: Slot | None = None) -> Slot:
        """A new slot, for which an idle one other than ``spared`` may be evicted."""
        if not self._free_rows:
            self._evict_for_a_row(spared)
        if self._digest.num_touched >= self._max_touched:
            self.digest()  # bounds the touched slots where nobody else asks for the digest
        slot = Slot(session_id, tenant, self._free_rows.pop(), ephemeral)
        self.slots[session_id] = self.by_row[slot.row] = slot
        self._idle[session_id] = slot
        self._digest.touch(slot)
        return slot

    def _cut(self, slot: Slot, keep_len: int) -> int:
        """Cut KV to ``keep_len`` tokens and free the tail. The only place that shortens a slot's KV."""
        slot.committed_len = min(slot.committed_len, keep_len)
        slot.allocated_len = slot.committed_len
        num_freed = self._tables.cut(slot, -(-slot.committed_len // self.page_size))
        self._digest.touch(slot)
        del slot.entries[slot.committed_len // self.page_size :]
        return num_freed

    def _take_cached_prefix(self, slot: Slot, tokens: array[int]) -> None:
        size = self.page_size
        if slot.committed_len != len(slot.entries) * size:
            return  # the last page is partial or not indexed, and tables are never rewritten (L2)
        entry = slot.entries[-1] if slot.entries else self.index.root(slot.tenant)
        while slot.committed_len + size < len(tokens):
            start = slot.committed_len
            page_tokens = tokens[start : start + size]
            found = self.index.find(entry, page_tokens)
            if found is None:
                return
            entry = found
            entry.shared |= entry.owner != slot.session_id
            self._tables.append_shared(slot, entry.page)
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

    def _reserve(self, num_pages: int) -> None:
        """Evict until ``num_pages`` pages are free, or raise OutOfPages and change nothing."""
        if self.pool.num_free >= num_pages:
            return
        if num_pages > self.pool.num_free + self.pool.num_cached:
            self._require_evictable(num_pages)
        while self.pool.num_free < num_pages:
            if not self.index.evict_oldest() and not self._evict_oldest_idle():
                raise AssertionError("fewer pages could be evicted than were counted")

    def _require_evictable(self, num_pages: int) -> None:
        # Exact: every page that no running slot and no pending copy lists can be evicted. Counted only
        # when free and cached pages do not suffice, because it costs O(pages of running turns).
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
        """Evict the least recently used idle slot. False if no slot is idle."""
        oldest = next(iter(self._idle.values()), None)
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
