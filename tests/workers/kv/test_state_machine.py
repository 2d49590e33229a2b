"""All operations of the KV core in random order against a naive model; laws L1-L7 after every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.errors import OutOfPages, SessionBusy, SessionExists
from workers.engine.step_log import LogReader, LogWriter, RecordedCache
from workers.kv import FREED, GroupSpec, Outcome, SessionCache, full_group, latent_group, window_group
from workers.kv.digest import StateDigest
from workers.kv.slot import new_tokens

SESSIONS = ["a", "b", "c", "d", "e"]
# How many tokens from the end: often none, mostly few, so that cuts fall inside pages.
CUTS = st.one_of(st.just(0), st.integers(1, 6), st.integers(0, 60))
# Few distinct inputs, so that sessions share prefixes all the time.
INPUTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
    st.integers(1, 20).map(lambda n: [0] * n),
)
TENANTS = {"a": "x", "b": "x", "c": "x", "d": "y", "e": "x"}
TENANTS |= {f"held {session}": tenant for session, tenant in TENANTS.items()}


NUM_PAGES = st.integers(3, 24)
FULL, LATENT = NUM_PAGES.map(full_group), NUM_PAGES.map(latent_group)


def windows(longest: int) -> st.SearchStrategy[GroupSpec]:
    """From a window smaller than a page to one longer than most sessions."""
    return st.builds(window_group, NUM_PAGES, st.integers(1, longest))


GROUPS = st.one_of(
    st.tuples(FULL),
    st.tuples(LATENT),
    st.tuples(windows(20)),
    st.tuples(FULL, windows(20)),
    st.tuples(windows(6), LATENT),
    st.tuples(FULL, windows(3), windows(40)),
)


@dataclass
class ModelSession:
    """What a session is, without pages: its tokens as of the last good turn, and its turn's."""

    tokens: list[int] = field(default_factory=list)
    turn: list[int] | None = None
    running: bool = False
    resumed_len: int = 0
    """What the turn began with: an abort goes back to no less."""
    keeps_start: bool = False
    """The window before the turn's start was held when it began, or is computed by it."""


def prefix_hashes(session: str, tokens: list[int]) -> list[int]:
    hashes, chain = [], hash(TENANTS[session])
    for token in tokens:
        chain = hash((chain, token))
        hashes.append(chain)
    return hashes


class KVCore(RuleBasedStateMachine):
    """``kv[page][offset]`` plays the device's memory: each position holds a hash of its whole prefix,
    so that reading a page that was overwritten, freed or served to the wrong prefix is seen at once."""

    @initialize(page_size=st.sampled_from([4, 2, 16, 1]), groups=GROUPS, weak=st.booleans(), points=st.integers(0, 2))
    def start(self, page_size: int, groups: tuple[GroupSpec, ...], weak: bool, points: int) -> None:
        self.cache = RecordedCache(groups, page_size, 5, points)
        # Another rank, which knows of all this by the step log alone.
        self.follower = LogReader(SessionCache(groups, page_size, 5, points), incarnation=1)
        self.log = LogWriter(incarnation=1, num_followers=1)
        if weak:
            for cache in (self.cache, self.follower.cache):
                cache.index._digest = lambda parent, tokens: b"same"
        self.kv: list[list[list[int | None]]] = [[[None] * page_size for _ in range(g.num_pages)] for g in groups]
        self.table: dict[tuple[int, int, int], int] = {}
        self.model: dict[str, ModelSession] = {}
        self.turn_number = 0

    # ---- the device, played -------------------------------------------------------------------

    def apply_step(self) -> None:
        for group, row, column, page in self.cache.take_table_updates():
            self.table[group, row, column] = page
        self.follow()
        assert self.follower.cache.take_table_updates() is not None
        assert self.follower.cache.pending_copies == self.cache.pending_copies
        copies = list(self.cache.pending_copies)
        for group, source, target in copies:
            self.kv[group][target] = list(self.kv[group][source])
        self.cache.finish_copies(len(copies))
        self.follower.cache.finish_copies(len(copies))

    def follow(self) -> None:
        entry = self.log.append(self.cache.take_ops(), None, self.cache.digest())
        self.log.ack(1, self.follower.apply(entry))

    def write(self, session: str, start: int, tokens: list[int]) -> None:
        slot, size = self.cache.slots[session], self.cache.page_size
        chain = prefix_hashes(session, [*slot.tokens[:start], *tokens])
        for group, table in zip(self.cache.groups, slot.tables, strict=True):
            for position in range(max(0, start - group.window + 1) if group.window else 0, start):
                page = self.table[group.index, slot.row, position // size]
                assert page == table.pages[position // size], "attention reads a page that was freed (L5)"
            for position in range(start, start + len(tokens)):
                page = self.table[group.index, slot.row, position // size]
                assert page == table.pages[position // size], "the device's table and the core's differ (L2)"
                assert group.pool.refcounts[page] == 1, "a shared page was written (L4)"
                self.kv[group.index][page][position % size] = chain[position]

    def known(self, session: str) -> int:
        return len(self.cache.slots[session].tokens)

    # ---- rules ----------------------------------------------------------------------------------

    def open(self, session: str) -> bool:
        try:
            self.cache.open(session, TENANTS[session])
        except OutOfPages:
            return False
        self.model.setdefault(session, ModelSession())
        self.forget_evicted()
        return True

    @rule(
        session=st.sampled_from(SESSIONS),
        cut=CUTS,
        delta=INPUTS,
        retries=st.integers(1, 2),
    )
    def begin_turn(self, session: str, cut: int, delta: list[int], retries: int) -> None:
        if not self.open(session):
            return
        model = self.model[session]
        if model.turn is not None:
            with pytest.raises(SessionBusy):
                self.cache.resume(session, "other", new_tokens([1]), 0)
            return
        keep = max(0, self.known(session) - cut)
        tokens = [*self.cache.slots[session].tokens[:keep], *delta]
        self.turn_number += 1
        model.turn, model.running = tokens, True
        model.tokens = tokens[:keep]
        slot = self.cache.slots[session]
        at_least = self.cache._resumable_len(slot, min(keep, slot.committed_len, len(tokens) - 1))
        results = {self.cache.resume(session, str(self.turn_number), new_tokens(tokens), keep) for _ in range(retries)}
        assert len(results) == 1, "resume twice is resume once (L6)"
        cached = results.pop()
        assert at_least <= cached <= len(tokens) - 1
        # A prefix that was matched from before the turn's start to past it brings the window at its own end alone.
        model.keeps_start = cached <= keep or at_least == keep
        model.resumed_len = min(cached, keep) if model.keeps_start else 0

    @precondition(lambda self: any(m.running for m in self.model.values()))
    @rule(data=st.data(), num_draft=st.integers(0, 5), chunk=st.integers(1, 20))
    def step(self, data: st.DataObject, num_draft: int, chunk: int) -> None:
        """Compute a chunk of a turn: extend (perhaps speculatively), write, commit (perhaps fewer)."""
        session = data.draw(st.sampled_from(sorted(s for s, m in self.model.items() if m.running)))
        self.compute(session, num_draft, chunk, data.draw(st.integers(0, 2)))

    @rule(session=st.sampled_from(SESSIONS), cut=CUTS, delta=INPUTS, outcome=st.sampled_from(Outcome))
    def whole_turn(self, session: str, cut: int, delta: list[int], outcome: Outcome) -> None:
        """So that sessions grow long enough to share, to be cut inside and to run out of pages."""
        if self.model.get(session, ModelSession()).turn is not None:
            return
        self.begin_turn(session, cut, delta, 1)
        if self.model.get(session, ModelSession()).running and self.compute(session, 0, 80, 0):
            self.finish(session, outcome, twice=False)

    def compute(self, session: str, num_draft: int, chunk: int, num_refused: int) -> bool:
        model, slot = self.model[session], self.cache.slots[session]
        assert model.turn is not None
        todo = model.turn[slot.committed_len : slot.committed_len + chunk]
        if not todo:
            todo = [len(model.turn) % 2]
            model.turn.extend(todo)
        before = self.state_of(session)
        try:
            if num_draft % 2:
                self.cache.reserve(session, len(model.turn) - slot.committed_len)
                before = self.state_of(session)
            self.cache.extend(session, len(todo) + num_draft)
        except OutOfPages:
            assert before == self.state_of(session)
            num_tokens = len(todo) + num_draft
            if num_draft % 2:
                num_tokens = max(num_tokens, len(model.turn) - slot.committed_len)
            self.really_out_of_pages(session, num_tokens)
            self.apply_step()  # what was reserved may have copied a page
            self.forget_evicted()
            return False
        for table, pages in zip(slot.tables, before[1], strict=True):
            full = pages[: slot.committed_len // self.cache.page_size]
            assert table.pages[: len(full)] == full, "entries were replaced (L2)"
        self.apply_step()
        self.write(session, slot.committed_len, todo)
        self.cache.commit({session: new_tokens(todo[: max(1, len(todo) - num_refused)])})
        self.forget_evicted()
        return True

    def state_of(self, session: str) -> tuple[list[list[int]], list[list[int]], int, int]:
        slot = self.cache.slots[session]
        counts = [list(group.pool.refcounts) for group in self.cache.groups]
        return counts, [list(table.pages) for table in slot.tables], slot.allocated_len, slot.reserved_len

    @precondition(lambda self: any(m.running for m in self.model.values()))
    @rule()
    def decode_all(self) -> None:
        """One token of every running turn, as most steps do: in bulk, until the pages run out."""
        running = sorted(s for s, m in self.model.items() if m.running)
        todo = {}
        for session in running:
            turn, slot = self.model[session].turn, self.cache.slots[session]
            assert turn is not None
            if len(turn) == slot.committed_len:
                turn.append(len(turn) % 2)
            todo[session] = turn[slot.committed_len : slot.committed_len + 1]
        num_done = self.cache.extend_by_one(running)
        if num_done < len(running):
            self.really_out_of_pages(running[num_done], 1)
        self.apply_step()
        for session in running[:num_done]:
            self.write(session, self.cache.slots[session].committed_len, todo[session])
        self.cache.commit({session: new_tokens(todo[session]) for session in running[:num_done]})
        self.forget_evicted()

    def really_out_of_pages(self, session: str, num_tokens: int) -> None:
        slot, size = self.cache.slots[session], self.cache.page_size

        def is_short(group: int) -> bool:
            pinned = {p for s in self.cache.slots.values() if s.running for p in s.tables[group].pages} - {FREED}
            needed = -(-(slot.committed_len + num_tokens) // size) - len(slot.tables[group].pages) + 1
            return self.cache.groups[group].pool.num_pages - len(pinned) < needed

        assert any(is_short(group.index) for group in self.cache.groups), "pages were there, yet it gave up"

    @precondition(lambda self: any(m.turn is not None for m in self.model.values()))
    @rule(data=st.data(), outcome=st.sampled_from(Outcome), twice=st.booleans())
    def finish_one(self, data: st.DataObject, outcome: Outcome, twice: bool) -> None:
        busy = sorted(s for s, m in self.model.items() if m.turn is not None)
        self.finish(data.draw(st.sampled_from(busy)), outcome, twice)

    def finish(self, session: str, outcome: Outcome, twice: bool) -> None:
        model = self.model.get(session)
        slot = self.cache.slots.get(session)
        if model is None or slot is None or model.turn is None:
            self.cache.finish(session, "unknown", outcome)
            return
        if outcome is not Outcome.ABORTED and not model.running:
            return
        turn_id, committed = slot.turn_id, slot.committed_len
        assert turn_id is not None
        at_least = min(committed, model.resumed_len) if outcome is Outcome.ABORTED else 0
        known = new_tokens(model.turn[committed:]) if outcome is Outcome.COMPLETED else None
        for _ in range(1 + twice):
            self.cache.finish(session, turn_id, outcome, known)
        model.running = False
        if outcome is Outcome.RETRACTED:
            return
        if outcome is Outcome.COMPLETED:
            model.tokens = list(model.turn)
        model.turn = None
        assert slot.committed_len >= at_least, "an abort must find its window (L5)"
        self.same_as_model(session)

    @precondition(lambda self: any(m.turn is not None and not m.running for m in self.model.values()))
    @rule(data=st.data())
    def return_after_retract(self, data: st.DataObject) -> None:
        waiting = sorted(s for s, m in self.model.items() if m.turn is not None and not m.running)
        session = data.draw(st.sampled_from(waiting))
        model, slot = self.model[session], self.cache.slots[session]
        assert model.turn is not None and slot.turn_id is not None
        expected = min(slot.committed_len, len(model.turn) - 1)
        was_evicted = not slot.tokens
        cached = self.cache.resume(session, slot.turn_id, new_tokens(model.turn), len(slot.tokens))
        assert expected <= cached <= len(model.turn) - 1
        model.running = True
        if was_evicted:
            model.resumed_len, model.keeps_start = 0, cached <= slot.base_len

    @precondition(lambda self: self.model)
    @rule(data=st.data(), cut=CUTS, times=st.integers(1, 2))
    def free_tail(self, data: st.DataObject, cut: int, times: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.model)))
        keep = max(0, self.known(session) - cut)
        model = self.model[session]
        if model.turn is not None:
            with pytest.raises(SessionBusy):
                self.cache.free_tail(session, keep)
            return
        slot = self.cache.slots[session]
        before = [list(table.pages) for table in slot.tables]
        reached = self.cache._resumable_len(slot, min(keep, slot.committed_len))
        for _ in range(times):
            self.cache.free_tail(session, keep)
        assert slot.committed_len == reached, "a cut goes to the greatest length that can resume (L5)"
        for table, pages in zip(slot.tables, before, strict=True):
            kept = pages[: -(-reached // self.cache.page_size)]
            assert len(table.pages) == len(kept), "whole pages (L3)"
            assert all(now in (FREED, was) for now, was in zip(table.pages, kept, strict=True))
        del model.tokens[keep:]
        self.same_as_model(session)

    @rule(session=st.sampled_from(SESSIONS), chance=st.sampled_from([False, False, True]))
    def release(self, session: str, chance: bool) -> None:
        if not chance:
            return
        if self.model.get(session, ModelSession()).turn is not None:
            with pytest.raises(SessionBusy):
                self.cache.release_session(session)
            return
        self.cache.release_session(session)
        self.model.pop(session, None)
        assert self.cache.release_session(session) == 0

    @precondition(lambda self: self.model)
    @rule(data=st.data(), child=st.sampled_from(SESSIONS), cut=CUTS)
    def fork(self, data: st.DataObject, child: str, cut: int) -> None:
        parent = data.draw(st.sampled_from(sorted(self.model)))
        if TENANTS[parent] != TENANTS[child]:
            return
        if child in self.cache.slots:
            with pytest.raises(SessionExists):
                self.cache.fork(parent, child)
            return
        base = self.model[parent].tokens
        at = max(0, min(len(base), self.known(parent)) - cut)
        try:
            slot = self.cache.fork(parent, child, at)
        except OutOfPages:
            return
        self.forget_evicted()
        self.model[child] = ModelSession(tokens=base[:at])
        assert list(slot.tokens) == base[:at]

    @precondition(lambda self: any(m.turn is None for m in self.model.values()))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """Hold an idle session's pages for a reader, as a migration does; they stay readable (L4)."""
        parent = data.draw(st.sampled_from(sorted(s for s, m in self.model.items() if m.turn is None)))
        name, slot = f"held {parent}", self.cache.slots[parent]
        if name in self.cache.slots or not slot.tokens:
            return
        tokens, shared = slot.tokens[:], [entry.shared for entry in slot.entries]
        try:
            self.cache.fork(parent, name, for_reading=True)
        except OutOfPages:
            return
        self.forget_evicted()
        held = self.cache.resume(name, name, tokens + new_tokens([0]), len(tokens), match_prefix=False)
        assert held == slot.committed_len
        child = self.cache.slots[name]
        for start in slot.turn_starts:
            kept = self.cache._resumable_len(slot, start)
            assert self.cache._resumable_len(child, start) == kept, "a reader finds the windows of resume points"
        assert [entry.shared for entry in slot.entries] == shared, "a reader is no other user of the prefix"

    @precondition(lambda self: any(s.startswith("held") for s in self.cache.slots))
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(s for s in self.cache.slots if s.startswith("held"))))
        self.cache.finish(name, name, Outcome.ABORTED)
        self.cache.release_session(name)

    @precondition(lambda self: any(s.startswith("held") for s in self.cache.slots))
    @rule(data=st.data(), into=st.sampled_from(SESSIONS))
    def import_held(self, data: st.DataObject, into: str) -> None:
        """Copy what a reader holds into another session, as the target of a migration does (in one pool)."""
        name = data.draw(st.sampled_from(sorted(s for s in self.cache.slots if s.startswith("held"))))
        if TENANTS[name] != TENANTS[into] or into in self.cache.slots or not self.open(into):
            return
        source = self.cache.slots[name]
        tokens, committed = source.tokens[:], source.committed_len
        end = -(-committed // self.cache.page_size)
        columns = [[c for c in table.held() if c < end] for table in source.tables]
        cached = self.cache.resume(into, "import", tokens, 0)
        slot, first = self.cache.slots[into], cached // self.cache.page_size
        self.model[into] = ModelSession()
        try:
            if committed > cached:
                self.cache.extend_imported(into, committed - cached, source.turn_starts, columns)
        except OutOfPages:
            self.cache.finish(into, "import", Outcome.ABORTED)
            return
        self.apply_step()
        for kv, ours, theirs, part in zip(self.kv, slot.tables, source.tables, columns, strict=True):
            for column in part:
                if column >= first and committed > cached:
                    assert ours.pages[column] != FREED, "what is sent has a page"
                    assert self.cache.audit().ok
                    kv[ours.pages[column]] = list(kv[theirs.pages[column]])
        if committed > cached:
            self.cache.commit({into: tokens[cached:committed]})
        reached = slot.committed_len
        self.cache.finish(into, "import", Outcome.COMPLETED, tokens[reached:])
        self.model[into].tokens = list(tokens)
        self.forget_evicted()

    @precondition(lambda self: self.cache.slots)
    @rule(data=st.data())
    def tamper(self, data: st.DataObject) -> None:
        """A change that no operation made, in any group, changes the digest (L8); then it is taken back."""
        self.follow()
        group = data.draw(st.sampled_from(self.cache.groups))
        slot = self.cache.slots[data.draw(st.sampled_from(sorted(self.cache.slots)))]
        table, digest = slot.tables[group.index], self.cache.digest()
        changed = data.draw(st.sampled_from(["table", "count"] if table.held() else ["count"]))
        page = data.draw(st.integers(0, group.pool.num_pages - 1))
        for change in (1, -1):
            if changed == "table":
                table.digest += change
                self.cache._digest.touch(slot)
            else:
                group.pool.refcounts[page] += change
                group.pool.touched.add(page)
            assert (self.cache.digest() == digest) == (change < 0)

    @rule()
    def finish_step(self) -> None:
        self.apply_step()

    @rule(everything=st.sampled_from([False, False, False, False, False, True]))
    def evict(self, everything: bool) -> None:
        if everything:
            self.cache.flush()
        else:
            self.follow()
            for cache in (self.cache, self.follower.cache):
                cache._evict_oldest_idle()  # as pressure would
        self.forget_evicted()

    # ---- laws -----------------------------------------------------------------------------------

    def forget_evicted(self) -> None:
        for session in [s for s in self.model if s not in self.cache.slots]:
            assert self.model[session].turn is None, "a slot with a turn was dropped"
            del self.model[session]

    def same_as_model(self, session: str) -> None:
        """After a turn the slot knows the session's tokens, or a prefix (what an eviction left)."""
        slot, tokens = self.cache.slots[session], self.model[session].tokens
        assert list(slot.tokens) == tokens[: len(slot.tokens)]
        if len(slot.tokens) < len(tokens):
            self.model[session].tokens = tokens[: len(slot.tokens)]

    @invariant()
    def pages_are_free_or_held(self) -> None:
        if hasattr(self, "cache"):
            report = self.cache.audit()
            assert report.ok, report

    @invariant()
    def the_follower_holds_the_same_state(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.follow()
        ours, theirs = self.cache, self.follower.cache
        for a, b in zip(ours.groups, theirs.groups, strict=True):
            assert a.pool.free_pages() == b.pool.free_pages()
            assert a.pool.cached_pages() == b.pool.cached_pages()
        assert list(ours._idle) == list(theirs._idle)
        for session, slot in ours.slots.items():
            other = theirs.slots[session]
            assert (slot.tokens, slot.row, slot.turn_starts) == (other.tokens, other.row, other.turn_starts)
            assert [(t.pages, t.kept) for t in slot.tables] == [(t.pages, t.kept) for t in other.tables]
        digest = ours.digest()
        afresh = StateDigest([group.pool for group in ours.groups], ours.page_size)
        for group in ours.groups:
            group.pool.touched.update(range(group.pool.num_pages))
        for slot in ours.slots.values():
            afresh.touch(slot)
        assert digest == afresh.update()

    @invariant()
    def kv_is_the_kv_of_the_tokens(self) -> None:
        for session, slot in getattr(self, "cache", SessionCache((full_group(1),), 1)).slots.items():
            size, chain = self.cache.page_size, prefix_hashes(session, list(slot.tokens))
            for kv, table in zip(self.kv, slot.tables, strict=True):
                for column in table.held():
                    for position in range(column * size, min((column + 1) * size, slot.committed_len)):
                        found = kv[table.pages[column]][position % size]
                        assert found == chain[position], f"{session} at {position}: KV of other tokens"

    @invariant()
    def resume_points_can_be_resumed(self) -> None:
        for session, model in getattr(self, "model", {}).items():
            slot = self.cache.slots[session]
            if model.turn is not None and model.keeps_start and slot.committed_len >= slot.base_len:
                assert self.cache._resumable_len(slot, slot.base_len) == slot.base_len, "the running turn's start"

    @invariant()
    def lengths_are_ordered(self) -> None:
        for session, slot in getattr(self, "cache", SessionCache((full_group(1),), 1)).slots.items():
            assert 0 <= slot.committed_len <= slot.allocated_len <= slot.reserved_len
            assert slot.running == (session.startswith("held") or self.model[session].running)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for session, slot in list(self.cache.slots.items()):
            if slot.turn_id is not None:
                self.cache.finish(session, slot.turn_id, Outcome.ABORTED)
            self.cache.release_session(session)
        self.cache.finish_copies(len(self.cache.pending_copies))
        self.cache.flush()
        assert self.cache.num_free() == [group.pool.num_pages for group in self.cache.groups], "pages leaked"


TestKVCore = KVCore.TestCase
# The number of examples comes from the profile: see tests/conftest.py.
TestKVCore.settings = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
