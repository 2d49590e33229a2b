"""The session cache: slots that live from turn to turn, and the few operations that change them.

Everything here is a pure function of the calls made: no clock, no randomness, no I/O, and nothing
depends on the order of a set. Ranks that make the same calls hold the same state (law L8).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence

from holdfast.errors import InvalidRequest, OutOfPages, SessionBusy, SessionExists
from workers.kv.page_table import GroupTables, TableUpdate
from workers.kv.scopes import OWN_SCOPE, KVScope
from workers.kv.slot import Outcome, Slot
from workers.kv.slot_store import SlotStore


class SessionCache(SlotStore):
    """What changes one rank's slots. Operations check before they change anything."""

    # ---- a turn's operations, in order --------------------------------------------------------

    def open(self, session_id: str, tenant: str = "", *, scope: KVScope = OWN_SCOPE, ephemeral: bool = False) -> Slot:
        """The session's slot; a new, empty one if it has none, or has one in another scope. Idempotent.

        ``scope``: whose prefixes it shares; its share holds from now on.
        Raises SessionExists if another tenant has a session of that id, OutOfPages if turns own all slots, and
        SessionBusy if it has a turn in another scope.
        """
        scope = scope.named_by(tenant)
        slot = self.slots.get(session_id)
        if slot is not None:
            if slot.tenant != tenant:
                raise SessionExists(f"session {session_id} belongs to another tenant")
            if slot.scope != scope.name:
                if slot.turn_id is not None:
                    raise SessionBusy(f"session {session_id} is busy with turn {slot.turn_id} in another scope")
                self._evict(slot)
                slot = None
        if slot is None:
            slot = self._new_slot(session_id, tenant, scope.name, ephemeral=ephemeral)
        self._set_share(scope)
        return slot

    def resume(
        self, session_id: str, turn_id: str, tokens: array[int], keep_len: int, *, match_prefix: bool = True
    ) -> int:
        """Begin a turn whose whole input is ``tokens``, or resume it after a retract.

        The session has the first ``keep_len`` of them; the slot is cut to that (``free_tail``), and to at
        most ``len(tokens) - 1``: the last token is always computed, because its logits start the output.
        Where a window group does not hold what comes before, the cut goes to the greatest length from which
        all groups can resume. With ``match_prefix``, pages of a prefix that other sessions computed are
        shared from the index. Allocates nothing. Idempotent for the same turn (law L6).

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
            if slot.turn_starts and slot.turn_starts[-1] > keep_len:
                self._drop_turn_starts(slot, keep_len)
        slot.running, slot.owns_tail = True, False
        self._idle.pop(session_id, None)
        del slot.tokens[keep_len:]
        self._cut(slot, min(keep_len, len(tokens) - 1))
        if self.windows:
            self._slide(slot)  # before pages are added: the window before the turn's start must stay
        if match_prefix:
            self._take_cached_prefix(slot, tokens)
        return slot.committed_len

    def reserve(self, session_id: str, num_tokens: int) -> None:
        """Have the whole-prefix groups hold pages for the next ``num_tokens`` positions; see ``extend``.

        A prompt that is computed in chunks is admitted so: its window groups are extended chunk by chunk.
        """
        slot = self._slot(session_id)
        self._extend(slot, slot.allocated_len, slot.committed_len + num_tokens)

    def extend(self, session_id: str, num_tokens: int) -> None:
        """Append pages for positions up to ``committed_len + num_tokens``, in every group.

        Evicts cached pages, then idle slots, least recently used first. A shared partial page is
        replaced by a copy before it can be written (law L4). Raises OutOfPages and changes nothing then.
        """
        slot = self._slot(session_id)
        self._extend(slot, slot.committed_len + num_tokens, slot.committed_len + num_tokens)

    def extend_by_one(self, session_ids: Sequence[str]) -> int:
        """``extend`` each session by one position, in order, until no page is left.

        Returns how many were extended. Decoding turns cost a step just this call.
        """
        size, touch = self.page_size, self._digest.touch
        for num_done, session_id in enumerate(session_ids):
            slot = self.slots.get(session_id) or self._slot(session_id)
            at = slot.committed_len
            if slot.owns_tail and at % size:
                if slot.allocated_len <= at:
                    slot.allocated_len = at + 1
                    if slot.reserved_len <= at:
                        slot.reserved_len = at + 1
                    touch(slot)
                continue
            try:
                self._extend(slot, at + 1, at + 1)
            except OutOfPages:
                return num_done
        return len(session_ids)

    def free_positions(self, session_id: str) -> int:
        """How many positions past ``committed_len`` a running turn can hold without evicting anything."""
        slot = self._slot(session_id)
        columns = [len(slot.tables[group.index].pages) + group.pool.num_free for group in self.groups]
        return min(columns) * self.page_size - slot.committed_len

    def cut_tails(self, session_ids: Sequence[str]) -> None:
        """Cut running turns to what is committed: positions of drafts that were not accepted are a tail (law L3)."""
        for session_id in session_ids:
            slot = self._slot(session_id)
            self._cut(slot, slot.committed_len)

    def extend_imported(
        self, session_id: str, num_tokens: int, turn_starts: Sequence[int], columns: Sequence[Collection[int]]
    ) -> None:
        """``extend`` by positions whose KV another worker sends, which holds ``columns`` of each group.

        ``turn_starts`` are that session's. A window group gets pages for no other columns.
        Raises OutOfPages and changes nothing then.
        """
        slot = self._slot(session_id)
        size, first = self.page_size, slot.committed_len
        reached = first + num_tokens
        columns = [
            [c for c in columns[group.index] if len(table.pages) <= c < -(-reached // size)]
            if group.window
            else range(len(table.pages), -(-reached // size))
            for group, table in zip(self.groups, slot.tables, strict=True)
        ]
        shared = self._shared_partial(slot)
        self._make_room(slot, [(group, (group in shared) + len(columns[group.index])) for group in self.groups])
        for group, table in zip(self.groups, slot.tables, strict=True):
            if group in shared:
                group.copy_last_page(table)
            group.append_imported(table, -(-reached // size), columns[group.index])
        slot.owns_tail = True
        slot.allocated_len = slot.reserved_len = max(slot.reserved_len, reached)
        slot.turn_starts = tuple(turn_starts)[-self._num_resume_points :] if self._num_resume_points else ()
        slot.protected_points = None
        self._digest.touch(slot)

    def _extend(self, slot: Slot, allocated_len: int, reserved_len: int) -> None:
        assert slot.running, f"session {slot.session_id} has no running turn to extend"
        size, tables, is_short = self.page_size, slot.tables, False
        window_end, end = -(-allocated_len // size), -(-reserved_len // size)
        shared = [] if slot.owns_tail else self._shared_partial(slot)
        wanted = []
        for group in self.groups:
            table = tables[group.index]
            count = (window_end if group.window else end) - len(table.pages)
            if shared and group in shared:
                count = max(0, count) + 1
            if count > 0:
                wanted.append((group, table, count))
                if count > len(group.pool.free):
                    is_short = True
        if is_short:
            self._make_room(slot, [(group, count) for group, _, count in wanted])
        for group, table, count in wanted:
            if shared and group in shared:
                group.copy_last_page(table)
                count -= 1
            if count:
                group.append_free(table, count)
        slot.owns_tail = True
        slot.allocated_len = max(slot.allocated_len, allocated_len)
        slot.reserved_len = max(slot.reserved_len, reserved_len)
        self._digest.touch(slot)

    def _shared_partial(self, slot: Slot) -> list[GroupTables]:
        """The groups whose last, partial page has other holders: it must be copied before it is written."""
        if slot.committed_len % self.page_size == 0:
            return []
        column, tables = slot.committed_len // self.page_size, slot.tables
        shared = [g for g in self.groups if g.pool.refcounts[tables[g.index].pages[column]] > 1]
        assert all(len(tables[g.index].pages) == column + 1 for g in shared), "a shared page lies inside a table"
        return shared

    def commit(self, computed: Mapping[str, array[int]]) -> None:
        """Mark the KV of these tokens, at each session's next positions, as computed; index pages that fill up.

        Window groups free the pages that their windows have passed.
        """
        for session_id, tokens in computed.items():
            self._commit(self._slot(session_id), tokens)

    def _commit(self, slot: Slot, tokens: array[int]) -> None:
        start, end = slot.committed_len, slot.committed_len + len(tokens)
        assert slot.running, f"session {slot.session_id} has no running turn to commit to"
        assert end <= slot.allocated_len, f"commit to {end} past the allocated {slot.allocated_len}"
        if start == len(slot.tokens):
            slot.tokens.extend(tokens)
        elif end > len(slot.tokens):
            del slot.tokens[start:]
            slot.tokens.extend(tokens)
        else:
            slot.tokens[start:end] = tokens
        slot.committed_len = end
        self._digest.touch(slot)
        if end // self.page_size > start // self.page_size:
            self._index_full_pages(slot)
        for group in self.windows:
            table = slot.tables[group.index]
            if end >= table.slides_from:
                group.slide(table, end)

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
            if self.windows and slot.base_len not in slot.turn_starts:
                self._add_turn_start(slot)
        self._cut(slot, min(slot.committed_len, len(slot.tokens)))
        slot.running = False
        if outcome is not Outcome.RETRACTED:
            slot.turn_id = None
            if slot.ephemeral:
                self._drop(slot)
                return
        if self.windows and (slot.turn_id is not None or slot.turn_starts != slot.protected_points):
            self._slide(slot)
        self._idle[session_id] = slot
        self._idle.move_to_end(session_id)

    # ---- control plane -----------------------------------------------------------------------

    def free_tail(self, session_id: str, keep_len: int) -> int:
        """Cut an idle session to its first ``keep_len`` tokens. Returns the number of pages freed.

        Frees whole pages from ``ceil(keep_len / page_size)`` on (law L3), and more where a window group
        cannot resume from there. Idempotent (L6).
        Raises SessionNotFound, SessionBusy, InvalidRequest if ``keep_len`` is negative.
        """
        slot = self._slot(session_id)
        if keep_len < 0:
            raise InvalidRequest(f"keep_len must not be negative, got {keep_len}")
        if slot.turn_id is not None:
            raise SessionBusy(f"session {session_id} is busy with turn {slot.turn_id}; wait or abort it")
        del slot.tokens[keep_len:]
        num_freed = self._cut(slot, keep_len)
        if slot.turn_starts and slot.turn_starts[-1] > keep_len:
            self._drop_turn_starts(slot, keep_len)
            num_freed += self._slide(slot)
        return num_freed

    def release_session(self, session_id: str, *, moved: bool = False) -> int:
        """Drop a session. Returns the number of pages freed; 0 if nothing is left of it (law L6).

        Its pages leave the prefix index too, including the branches it rewound or aborted, except
        pages that another session has used. ``moved``: it lives on elsewhere, and so may copies of its pages.
        Raises SessionBusy: the caller ends the turn first, with ``finish``.
        """
        slot, free_before = self.slots.get(session_id), self.num_free()
        if slot is not None:
            if slot.turn_id is not None:
                raise SessionBusy(f"session {session_id} is busy with turn {slot.turn_id}; wait or abort it")
            self._drop(slot)
        # Even if the slot was evicted before: the session's pages may still be cached.
        self.index.remove_owned(session_id)
        if self.index.events is not None and not moved:
            self.index.events.release(session_id)
        return sum(self.num_free()) - sum(free_before)

    def fork(self, parent_id: str, child_id: str, at_len: int | None = None, *, for_reading: bool = False) -> Slot:
        """A new session with the first ``at_len`` tokens of ``parent_id``, sharing its pages.

        Default: all of the parent, as of its last good turn. A running parent still writes into its
        partial page, so only its full pages are shared and the child computes the rest again, as it does
        from the greatest length on from which the parent's windows let it resume.
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
        child = self._new_slot(child_id, parent.tenant, parent.scope, spared=parent)
        if parent_id in self._idle:
            self._idle.move_to_end(parent_id)
        size = self.page_size
        shared_len = min(at_len, parent.committed_len)
        if parent.running:
            shared_len -= shared_len % size
        shared_len = self._resumable_len(parent, shared_len)
        child.tokens = parent.tokens[:at_len]
        if not for_reading:
            child.entries = parent.entries[: shared_len // size]
            for entry in child.entries:
                entry.shared = True
        child.turn_starts = tuple(start for start in parent.turn_starts if start <= shared_len)
        child.protected_points = child.turn_starts
        for group, ours, theirs in zip(self.groups, child.tables, parent.tables, strict=True):
            group.protect(ours, child.turn_starts)
            group.share(theirs, ours, shared_len)
        child.committed_len = child.allocated_len = child.reserved_len = shared_len
        return child

    # ---- the engine's side of a step ---------------------------------------------------------

    def take_table_updates(self) -> list[TableUpdate]:
        """Changes to the device's page tables since the last call, in order."""
        updates = self._updates[:]
        self._updates.clear()
        return updates

    def finish_copies(self, count: int) -> None:
        """The device has made the first ``count`` pending copies (or queued them before any later write)."""
        done = self.pending_copies[:count]
        del self.pending_copies[:count]
        for copy in done:
            self.groups[copy.group].pool.decref(copy.source)

    def flush(self, tenant: str | None = None) -> None:
        """Drop all idle slots and cached pages, or those of a tenant; running turns keep theirs."""
        if self.index.events is not None:
            self.index.events.flush(tenant)
        if tenant is not None:
            for slot in [slot for slot in self._idle.values() if slot.tenant == tenant]:
                self._evict(slot)
            self.index.remove_cached(tenant)
            return
        while self._evict_oldest_idle():
            pass
        for group in self.groups:
            while self.index.evict_oldest(group.index):
                pass

    # ---- inside --------------------------------------------------------------------------------

    def _drop_turn_starts(self, slot: Slot, keep_len: int) -> None:
        slot.turn_starts = tuple(start for start in slot.turn_starts if start <= keep_len)

    def _add_turn_start(self, slot: Slot) -> None:
        if self._num_resume_points:
            slot.turn_starts = (*slot.turn_starts, slot.base_len)[-self._num_resume_points :]

    def _take_cached_prefix(self, slot: Slot, tokens: array[int]) -> None:
        size, known = self.page_size, len(slot.entries)
        if slot.committed_len != known * size:
            return  # the last page is partial or not indexed, and tables are never rewritten (L2)
        parent = slot.entries[-1] if slot.entries else self.index.root(slot.scope)
        found = self.index.longest_match(parent, slot.tables, known, tokens, size)
        if not found:
            return
        reached = (known + len(found)) * size
        for group, table in zip(self.groups, slot.tables, strict=True):
            group.skip_to(table, group.first_needed(reached))
            for entry in found[len(table.pages) - known :]:
                group.append_shared(table, entry.pages[group.index])
        for entry in found:
            entry.shared |= entry.owner != slot.session_id
        slot.entries += found
        if len(slot.tokens) < reached:
            del slot.tokens[slot.committed_len :]
            slot.tokens.extend(tokens[slot.committed_len : reached])
        slot.committed_len = slot.allocated_len = slot.reserved_len = reached

    def _index_full_pages(self, slot: Slot) -> None:
        size = self.page_size
        parent = slot.entries[-1] if slot.entries else self.index.root(slot.scope)
        for column in range(len(slot.entries), slot.committed_len // size):
            tokens = slot.tokens[column * size : (column + 1) * size]
            entry = self.index.add(parent, tokens, slot.tables, column, slot.session_id)
            if entry is None:
                return
            slot.entries.append(entry)
            parent = entry
