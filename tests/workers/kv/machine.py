"""A cache, a rank that follows its log, a device and a naive model, and the laws that hold after every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from holdfast.errors import OutOfPages
from holdfast.names import scoped
from workers.engine.step_log import LogReader, LogWriter, RecordedCache
from workers.kv import FREED, GroupSpec, KVScope, Outcome, SessionCache, Slot, full_group, latent_group, window_group
from workers.kv.digest import StateDigest
from workers.kv.page_table import GroupTables
from workers.kv.slot import new_tokens

TENANTS = {scoped(tenant, session): tenant for session, tenant in zip("abcde", "xxxyx", strict=True)}
SESSIONS = list(TENANTS)
# How many tokens from the end: often none, mostly few, so that cuts fall inside pages.
CUTS = st.one_of(st.just(0), st.integers(1, 6), st.integers(0, 60))
# Few distinct inputs, so that sessions share prefixes all the time.
INPUTS = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=20),
    st.integers(1, 20).map(lambda n: [0] * n),
)
TENANTS |= {f"held {session}": tenant for session, tenant in TENANTS.items()}
SHARES = st.sampled_from([0, 0, 100_000, 300_000, 600_000])
SCOPES = st.one_of(
    st.just({"x": KVScope("x"), "y": KVScope("y")}),
    st.builds(lambda x, y: {"x": KVScope("x", x), "y": KVScope("y", y)}, SHARES, SHARES),
    st.builds(lambda share: dict.fromkeys("xy", KVScope("both", share)), SHARES),
)
"""Tenants by themselves, with shares, or as a share group."""


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


def prefix_hashes(slot: Slot, tokens: list[int]) -> list[int]:
    hashes, chain = [], hash(slot.scope)
    for token in tokens:
        chain = hash((chain, token))
        hashes.append(chain)
    return hashes


class Machine(RuleBasedStateMachine):
    """``kv[page][offset]`` plays the device's memory: each position holds a hash of its whole prefix,
    so that reading a page that was overwritten, freed or served to the wrong prefix is seen at once."""

    @initialize(
        page_size=st.sampled_from([4, 2, 16, 1]),
        groups=GROUPS,
        weak=st.booleans(),
        points=st.integers(0, 2),
        scopes=SCOPES,
    )
    def start(
        self, page_size: int, groups: tuple[GroupSpec, ...], weak: bool, points: int, scopes: dict[str, KVScope]
    ) -> None:
        self.scopes = scopes
        self.cache = RecordedCache(groups, page_size, 5, points)
        self.make_room, self.cache._make_room = self.cache._make_room, self.makes_room  # type: ignore[method-assign]  # watched
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

    def apply_step(self) -> None:
        for group, row, first, pages in self.cache.take_table_updates():
            self.table.update(((group, row, column), page) for column, page in enumerate(pages, first))
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
        chain = prefix_hashes(slot, [*slot.tokens[:start], *tokens])
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

    def open(self, session: str, scope: KVScope | None = None) -> bool:
        """``scope``: where it is not the one that the tenant's keys name now."""
        known, scope = self.cache.slots.get(session), scope or self.scopes[TENANTS[session]]
        if known is not None and known.turn_id is not None:
            scope = self.cache.scopes.named(known.scope)
        try:
            slot = self.cache.open(session, TENANTS[session], scope=scope)
        except OutOfPages:
            self.forget_evicted()
            return False
        assert slot.scope == scope.name
        if slot is not known:
            self.model[session] = ModelSession()  # new, or in another scope now
        self.forget_evicted()
        return True

    def makes_room(self, slot: Slot, wanted: list[tuple[GroupTables, int]]) -> None:
        """A scope beyond its share takes nothing from those that are not (``workers.kv.scopes``)."""
        before, scopes = self.in_use(), self.cache.scopes.pages
        over = {name for name, pages in scopes.items() if any(each.excess > 0 for each in pages)}
        beyond = [
            (group, count)
            for group, count in wanted
            if slot.scope in scopes and self.pinned(slot.scope, group) + count > scopes[slot.scope][group.index].limit
        ]
        self.make_room(slot, wanted)
        if len(beyond) == len(wanted):
            after = self.in_use()
            for name in before:
                assert name in (slot.scope, *over) or after[name] == before[name], f"{name} is within its share"

    def in_use(self) -> dict[str | None, list[set[int]]]:
        """The pages that are not free, by the scope that they are charged to, and group."""
        found: dict[str | None, list[set[int]]] = {None: [], **{name: [] for name in self.cache.scopes.pages}}
        for group in self.cache.groups:
            used = set(range(group.pool.num_pages)) - set(group.pool.free)
            for name, by_group in found.items():
                charged_to = self.cache.scopes.pages[name][group.index] if name is not None else None
                by_group.append({page for page in used if group.pool.charged_to(page) is charged_to})
        return found

    def pinned(self, scope: str, group: GroupTables) -> int:
        """The pages of a scope in one group that no eviction can free."""
        charged_to = self.cache.scopes.pages[scope][group.index]
        return sum(group.pool.charged_to(page) is charged_to for page in self.cache._pinned(group))

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

    def really_out_of_pages(self, session: str, num_tokens: int) -> None:
        slot, size = self.cache.slots[session], self.cache.page_size

        def is_short(group: int) -> bool:
            pinned = {p for s in self.cache.slots.values() if s.running for p in s.tables[group].pages} - {FREED}
            # A bulk decode may have made copies before: what they copy from stays until the step is applied.
            pinned |= {copy.source for copy in self.cache.pending_copies if copy.group == group}
            needed = -(-(slot.committed_len + num_tokens) // size) - len(slot.tables[group].pages) + 1
            return self.cache.groups[group].pool.num_pages - len(pinned) < needed or lacks_share(group, needed, pinned)

        def lacks_share(group: int, needed: int, pinned: set[int]) -> bool:
            pool, scopes = self.cache.groups[group].pool, self.cache.scopes.pages
            own = scopes[slot.scope][group] if slot.scope in scopes else None
            if own is None or sum(pool.charged_to(page) is own for page in pinned) + needed <= own.limit:
                return False
            evictable = set(range(pool.num_pages)) - pinned
            num_others = 0
            for pages in (by_group[group] for by_group in scopes.values() if by_group[group] is not own):
                theirs = sum(pool.charged_to(page) is pages for page in evictable)
                num_others += max(0, min(theirs, pages.num_charged - pages.limit))
            ours = sum(pool.refcounts[page] == 0 or pool.charged_to(page) is own for page in evictable)
            return ours + num_others < needed

        assert any(is_short(group.index) for group in self.cache.groups), "pages were there, yet it gave up"

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
            assert [t.pages for t in slot.tables] == [t.pages for t in other.tables]
        digest = ours.digest()
        afresh = StateDigest([group.pool for group in ours.groups], ours._digest.configuration)
        for group in ours.groups:
            group.pool.touched.update(range(group.pool.num_pages))
        for slot in ours.slots.values():
            afresh.touch(slot)
        assert digest == afresh.update()

    @invariant()
    def kv_is_the_kv_of_the_tokens(self) -> None:
        for session, slot in getattr(self, "cache", SessionCache((full_group(1),), 1)).slots.items():
            size, chain = self.cache.page_size, prefix_hashes(slot, list(slot.tokens))
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
