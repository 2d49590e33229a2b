"""All operations of the KV core in random order against a naive model; laws L1-L7 after every step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from holdfast.errors import OutOfPages, SessionBusy, SessionExists
from holdfast.names import tenant_of
from tests.workers.kv.machine import CUTS, INPUTS, SCOPES, SESSIONS, TENANTS, Machine, ModelSession
from workers.kv import FREED, KVScope, Outcome
from workers.kv.prefix import common_prefix_len
from workers.kv.slot import new_tokens


class KVCore(Machine):
    """The operations, as rules."""

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

    @precondition(lambda self: any(m.running for m in self.model.values()))
    @rule(
        data=st.data(), num_drafted=st.integers(1, 9), num_accepted=st.integers(0, 9), ends=st.sampled_from([0, 0, 1])
    )
    def verify_draft(self, data: st.DataObject, num_drafted: int, num_accepted: int, ends: int) -> None:
        """Decode one token and a draft, of which some is right; the turn may end before that is known."""
        session = data.draw(st.sampled_from(sorted(s for s, m in self.model.items() if m.running)))
        model, slot = self.model[session], self.cache.slots[session]
        assert model.turn is not None
        if len(model.turn) > slot.committed_len + 1 or not self.cache.extend_by_one([session]):
            return
        self.forget_evicted()
        if len(model.turn) == slot.committed_len:
            model.turn.append(len(model.turn) % 2)
        others = {name: other.committed_len for name, other in self.cache.slots.items()}
        cached = [group.pool.cached_pages() for group in self.cache.groups]
        draft = [1] * min(num_drafted, self.cache.free_positions(session) - 1)
        start = slot.committed_len
        self.cache.extend(session, 1 + len(draft))
        assert {name: other.committed_len for name, other in self.cache.slots.items()} == others, (
            "a guess evicts nothing"
        )
        assert [group.pool.cached_pages() for group in self.cache.groups] == cached
        self.apply_step()
        self.write(session, start, [model.turn[start], *draft])
        self.cache.commit({session: new_tokens(model.turn[start : start + 1])})
        if ends:
            self.finish(session, Outcome.ABORTED, twice=False)
            return
        accepted = draft[:num_accepted]
        if accepted:
            model.turn += accepted
            self.cache.commit({session: new_tokens(accepted)})
        self.cache.cut_tails([session])
        model.turn.append(0)
        assert slot.committed_len == slot.allocated_len == slot.reserved_len == start + 1 + len(accepted)
        for group, table in zip(self.cache.groups, slot.tables, strict=True):
            assert len(table.pages) == -(-slot.committed_len // self.cache.page_size), "the tail is cut (L3)"
            assert FREED not in table.pages[group.first_needed(slot.committed_len) :], "a guess freed a window's page"

    @precondition(lambda self: any(m.turn is not None for m in self.model.values()))
    @rule(data=st.data(), outcome=st.sampled_from(Outcome), twice=st.booleans())
    def finish_one(self, data: st.DataObject, outcome: Outcome, twice: bool) -> None:
        busy = sorted(s for s, m in self.model.items() if m.turn is not None)
        self.finish(data.draw(st.sampled_from(busy)), outcome, twice)

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
    @rule(data=st.data(), into=st.sampled_from(SESSIONS), cached_here=st.booleans())
    def import_held(self, data: st.DataObject, into: str, cached_here: bool) -> None:
        """Copy what a reader holds into another session, as the target of a migration does (in one pool).

        Another worker may have none of the source's pages, but what the session left there.
        """
        name = data.draw(st.sampled_from(sorted(s for s in self.cache.slots if s.startswith("held"))))
        busy = into in self.model and self.model[into].turn is not None
        if TENANTS[name] != TENANTS[into] or busy:
            return
        source, size = self.cache.slots[name], self.cache.page_size
        # As the source's: keys may have been changed since.
        if not self.open(into, self.cache.scopes.named(source.scope)) or name not in self.cache.slots:
            return
        tokens, committed = source.tokens[:], source.committed_len
        end = -(-committed // size)
        columns = [[c for c in table.held() if c < end] for table in source.tables]
        slot = self.cache.slots[into]
        keep_len = common_prefix_len(slot.tokens, tokens) // size * size
        cached = self.cache.resume(into, "import", tokens, keep_len, match_prefix=cached_here)
        first = cached // size
        self.model[into] = ModelSession(list(tokens[:keep_len]))
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
        changed = data.draw(
            st.sampled_from(["table", "count", "allocated"] if table.held() else ["count", "allocated"])
        )
        page = data.draw(st.integers(0, group.pool.num_pages - 1))
        for change in (1, -1):
            if changed != "count":
                table.digest += change * (changed == "table")
                slot.allocated_len += change * (changed == "allocated")
                self.cache._digest.touch(slot)
            else:
                group.pool.refcounts[page] += change
                group.pool.touched.add(page)
            assert (self.cache.digest() == digest) == (change < 0)

    @rule()
    def finish_step(self) -> None:
        self.apply_step()

    @rule(scopes=SCOPES, chance=st.sampled_from([False, False, False, True]))
    def share(self, scopes: dict[str, KVScope], chance: bool) -> None:
        """Keys were changed: the next turns come in other scopes, or with other shares."""
        if chance:
            self.scopes = scopes

    @rule(what=st.sampled_from(["idle slot", "idle slot", "idle slot", "idle slot", "x", "y", "everything"]))
    def evict(self, what: str) -> None:
        if what == "everything":
            self.cache.flush()
        elif what in TENANTS.values():
            self.cache.flush(what)
            assert not any(slot.tenant == what for slot in self.cache._idle.values())
            entries = list(self.cache.index._roots.values())
            for entry in entries:
                entries.extend(entry.children)
                if entry.parent is not None and tenant_of(entry.owner) == what:
                    assert entry.children or self.cache.index._is_held(entry), "it leads nowhere, and nobody uses it"
        else:
            self.follow()
            for cache in (self.cache, self.follower.cache):
                cache._evict_oldest_idle()  # as pressure would
        self.forget_evicted()


TestKVCore = KVCore.TestCase
# The number of examples comes from the profile: see tests/conftest.py.
TestKVCore.settings = settings(stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
