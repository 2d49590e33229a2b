"""All operations of the KV core in random order against a naive model; laws L1-L7 after every step."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.errors import OutOfPages, SessionBusy, SessionExists
from workers.engine.step_log import LogReader, LogWriter, RecordedCache
from workers.kv import Outcome, SessionCache
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


@dataclass
class ModelSession:
    """What a session is, without pages: its tokens as of the last good turn, and its turn's."""

    tokens: list[int] = field(default_factory=list)
    turn: list[int] | None = None
    running: bool = False


def prefix_hashes(session: str, tokens: list[int]) -> list[int]:
    hashes, chain = [], hash(TENANTS[session])
    for token in tokens:
        chain = hash((chain, token))
        hashes.append(chain)
    return hashes


class KVCore(RuleBasedStateMachine):
    """``kv[page][offset]`` plays the device's memory: each position holds a hash of its whole prefix,
    so that reading a page that was overwritten, freed or served to the wrong prefix is seen at once."""

    @initialize(page_size=st.sampled_from([4, 2, 16, 1]), num_pages=st.integers(3, 24), weak=st.booleans())
    def start(self, page_size: int, num_pages: int, weak: bool) -> None:
        self.cache = RecordedCache(num_pages, page_size, max_slots=5)
        # Another rank, which knows of all this by the step log alone.
        self.follower = LogReader(SessionCache(num_pages, page_size, max_slots=5), incarnation=1)
        self.log = LogWriter(incarnation=1, num_followers=1)
        if weak:
            for cache in (self.cache, self.follower.cache):
                cache.index._digest = lambda parent, tokens: b"same"
        self.kv: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.table: dict[tuple[int, int], int] = {}
        self.model: dict[str, ModelSession] = {}
        self.turn_number = 0

    # ---- the device, played -------------------------------------------------------------------

    def apply_step(self) -> None:
        for update in self.cache.take_table_updates():
            self.table[update.row, update.column] = update.page
        self.follow()
        assert self.follower.cache.take_table_updates() is not None
        assert self.follower.cache.pending_copies == self.cache.pending_copies
        copies = list(self.cache.pending_copies)
        for source, target in copies:
            self.kv[target] = list(self.kv[source])
        self.cache.finish_copies(len(copies))
        self.follower.cache.finish_copies(len(copies))

    def follow(self) -> None:
        entry = self.log.append(self.cache.take_ops(), None, self.cache.digest())
        self.log.ack(1, self.follower.apply(entry))

    def write(self, session: str, start: int, tokens: list[int]) -> None:
        slot, size = self.cache.slots[session], self.cache.page_size
        chain = prefix_hashes(session, [*slot.tokens[:start], *tokens])
        for position in range(start, start + len(tokens)):
            page = self.table[slot.row, position // size]
            assert page == slot.pages[position // size], "the device's table and the core's differ (L2)"
            assert self.cache.pool.refcounts[page] == 1, "a shared page was written (L4)"
            self.kv[page][position % size] = chain[position]

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
        cached = {self.cache.resume(session, str(self.turn_number), new_tokens(tokens), keep) for _ in range(retries)}
        assert len(cached) == 1 and cached.pop() <= len(tokens) - 1, "resume twice is resume once (L6)"

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
        before = (list(self.cache.pool.refcounts), list(slot.pages), slot.allocated_len)
        try:
            self.cache.extend(session, len(todo) + num_draft)
        except OutOfPages:
            assert before == (list(self.cache.pool.refcounts), list(slot.pages), slot.allocated_len)
            self.really_out_of_pages(session, len(todo) + num_draft)
            return False
        full = before[1][: slot.committed_len // self.cache.page_size]
        assert slot.pages[: len(full)] == full, "entries were replaced (L2)"
        self.apply_step()
        self.write(session, slot.committed_len, todo)
        self.cache.commit({session: new_tokens(todo[: max(1, len(todo) - num_refused)])})
        self.forget_evicted()
        return True

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
        pinned = {p for s in self.cache.slots.values() if s.running for p in s.pages}
        needed = -(-(slot.committed_len + num_tokens) // size) - len(slot.pages) + 1
        assert len(self.cache.pool.refcounts) - len(pinned) < needed, "pages were there, yet it gave up"

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
        known = new_tokens(model.turn[committed:]) if outcome is Outcome.COMPLETED else None
        for _ in range(1 + twice):
            self.cache.finish(session, turn_id, outcome, known)
        model.running = False
        if outcome is Outcome.RETRACTED:
            return
        if outcome is Outcome.COMPLETED:
            model.tokens = list(model.turn)
        model.turn = None
        self.same_as_model(session)

    @precondition(lambda self: any(m.turn is not None and not m.running for m in self.model.values()))
    @rule(data=st.data())
    def return_after_retract(self, data: st.DataObject) -> None:
        waiting = sorted(s for s, m in self.model.items() if m.turn is not None and not m.running)
        session = data.draw(st.sampled_from(waiting))
        model, slot = self.model[session], self.cache.slots[session]
        assert model.turn is not None and slot.turn_id is not None
        expected = min(slot.committed_len, len(model.turn) - 1)
        cached = self.cache.resume(session, slot.turn_id, new_tokens(model.turn), len(slot.tokens))
        assert expected <= cached <= len(model.turn) - 1
        model.running = True

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
        before, committed = list(slot.pages), slot.committed_len
        for _ in range(times):
            self.cache.free_tail(session, keep)
        assert slot.pages == before[: -(-min(keep, committed) // self.cache.page_size)], "whole pages (L3)"
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
        held = self.cache.resume(name, name, tokens, len(tokens), match_prefix=False)
        assert held == min(slot.committed_len, len(tokens) - 1)
        assert [entry.shared for entry in slot.entries] == shared, "a reader is no other user of the prefix"

    @precondition(lambda self: any(s.startswith("held") for s in self.cache.slots))
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(s for s in self.cache.slots if s.startswith("held"))))
        self.cache.finish(name, name, Outcome.ABORTED)
        self.cache.release_session(name)

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
        assert ours.pool.free_pages() == theirs.pool.free_pages()
        assert ours.pool.cached_pages() == theirs.pool.cached_pages()
        assert list(ours._idle) == list(theirs._idle)
        for session, slot in ours.slots.items():
            other = theirs.slots[session]
            assert (slot.pages, slot.tokens, slot.row) == (other.pages, other.tokens, other.row)
        afresh = StateDigest(ours.pool.num_pages, ours.page_size)
        for slot in ours.slots.values():
            afresh.touch(slot, 0)
        assert ours.digest() == afresh.update(ours.pool.refcounts, range(ours.pool.num_pages))

    @invariant()
    def kv_is_the_kv_of_the_tokens(self) -> None:
        for session, slot in getattr(self, "cache", SessionCache(1, 1)).slots.items():
            size, chain = self.cache.page_size, prefix_hashes(session, list(slot.tokens))
            for position in range(slot.committed_len):
                found = self.kv[slot.pages[position // size]][position % size]
                assert found == chain[position], f"{session} at {position}: KV of other tokens"

    @invariant()
    def lengths_are_ordered(self) -> None:
        for session, slot in getattr(self, "cache", SessionCache(1, 1)).slots.items():
            assert 0 <= slot.committed_len <= slot.allocated_len <= len(slot.pages) * self.cache.page_size
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
        assert self.cache.pool.num_free == self.cache.pool.num_pages, "pages leaked"


TestKVCore = KVCore.TestCase
# The number of examples comes from the profile: see tests/conftest.py.
TestKVCore.settings = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
