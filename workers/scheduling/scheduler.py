"""Continuous batching: which turns compute which tokens in the next step.

Each step mixes one token of every decoding turn with chunks of prompts, within a token budget (chunked
prefill, arXiv:2308.16369). A turn is admitted when the pool can hold its whole prompt. When a decode
finds no free page, the cache evicts idle slots; if there are none, the youngest turn is retracted: it
keeps its tokens, leaves the batch, and resumes when there is room. Background turns run on what the others
leave: they are admitted last, and retracted first, also for a turn that waits. So are turns of a scope that is
beyond its share of the pages, for those of the others (see ``workers.kv.scopes``).

A step may be planned before the tokens of the step before are known (see ``Turn.in_flight``): such a token is
computed as any other, and only a turn's limits say whether another follows it. A turn that turns out to have
ended has one position too many then, a tail that ``finish`` cuts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from operator import attrgetter
from typing import Protocol

from holdfast.errors import OutOfPages, PromptTooLong, QueueFull, SessionBusy
from workers.kv import OWN_SCOPE, KVScope, Outcome, OutOfShare, SessionCache
from workers.kv.page_table import GroupTables
from workers.kv.scopes import limit_pages
from workers.scheduling.speculation import Draft
from workers.scheduling.step import SchedulerLimits, Step, Work
from workers.scheduling.turn import Turn


class Drafts(Protocol):
    """What proposes the tokens that may follow a turn's last one."""

    def candidates(self, num_rows: int) -> list[Turn]:
        """The turns to ask for in a step of ``num_rows``, in an order that does not depend on chance."""

    def propose(self, turn: Turn, limit: int, num_rows: int) -> Draft | None:
        """At least one token, at most ``limit``, in a step of ``num_rows`` turns."""


class Scheduler:
    """Waiting and running turns over one session cache. Uses the order of arrival, no clock."""

    def __init__(self, cache: SessionCache, limits: SchedulerLimits, drafts: Drafts | None = None) -> None:
        self.cache = cache
        self.drafts = drafts
        self.limits = limits
        self.max_len = self.max_len_of(OWN_SCOPE)
        self.waiting: deque[Turn] = deque()
        self.running: dict[str, Turn] = {}
        self.turns: dict[str, Turn] = {}
        self.num_retracted = 0
        self.num_recomputed = 0
        """Tokens of retracted turns whose KV was evicted before they were admitted again."""
        self.paused = False
        """Plans compute nothing, and turns wait."""
        self._busy: dict[str, str] = {}
        self._arrivals = 0
        self._head_is_blocked = False
        self._blocked_scopes: set[str] = set()
        """Whose first waiting turn finds no room in its scope's share."""

    def max_len_of(self, scope: KVScope) -> int:
        """The length up to which any turn of a scope can run, if need be alone in its share."""
        return min(self.limits.context_len, *(self._max_len(group, scope.share_ppm) for group in self.cache.groups))

    def submit(self, turn: Turn) -> None:
        """Queue a turn. Raises PromptTooLong, SessionBusy or QueueFull, and changes nothing then."""
        if len(turn.tokens) >= (max_len := self.max_len_of(turn.scope)):
            share = " that your share of a worker's KV has room for" if max_len < self.max_len else ""
            raise PromptTooLong(
                f"the input of {len(turn.tokens)} tokens exceeds the maximum allowed length of "
                f"{max_len - 1} tokens{share}"
            )
        if turn.session_id in self._busy:
            raise SessionBusy(f"session {turn.session_id} already has an active request; wait or abort it")
        if len(self.waiting) >= self.limits.max_waiting // (2 if turn.params.background else 1):
            raise QueueFull(f"{len(self.waiting)} turns are waiting on this worker; retry later")
        self._arrivals += 1
        turn.arrival = self._arrivals
        self._busy[turn.session_id] = turn.turn_id
        self.turns[turn.turn_id] = turn
        self.waiting.append(turn)
        if not turn.params.background:
            self._unblock()  # blocked by a background turn, perhaps

    def plan(self) -> Step:
        """Plan the next step. Pages for all of its work are held when this returns."""
        work: dict[str, Work] = {}
        has_drafts = not self.paused and self._plan_work(work)
        copies, updates = list(self.cache.pending_copies), self.cache.take_table_updates()
        return Step(list(work.values()), copies, updates, has_drafts)

    def _plan_work(self, work: dict[str, Work]) -> bool:
        """Returns whether there are drafts."""
        self._plan_decodes(work)
        budget = max(0, self.limits.step_tokens - len(work))
        # New turns share the budget with running prefills, so that none waits for a long prompt to end.
        num_prefills = len(self.running) - len(work)
        budget -= self._admit(work, -(-budget // (num_prefills + 1)))
        if len(work) < len(self.running):
            self._plan_prefills(work, budget)
        return self.drafts is not None and self._plan_drafts(work, self.drafts)

    def retract_all(self) -> None:
        """Return every running turn to the queue."""
        for turn in sorted(self.running.values(), key=attrgetter("arrival"), reverse=True):
            self._retract(turn, {})

    @property
    def has_work(self) -> bool:
        """Whether the next plan may compute something."""
        return bool(self.turns) and not self.paused

    def commit(self, step: Step) -> None:
        """Commit the step's tokens: all are known now, and computed before anything that is planned later.

        Of turns that ended meanwhile, nothing is committed. The others' next tokens are in flight now.
        """
        computed = {}
        for w in step.work:
            turn = w.turn
            if turn.ended:
                continue
            end = w.start + (w.count if w.draft is None else w.num_known)
            computed[turn.session_id] = turn.tokens[w.start : end]
            turn.in_flight = w.samples
            if w.scored:
                turn.num_scored = w.scored.stop
        self.cache.commit(computed)

    def settle_drafts(self, step: Step) -> None:
        """A step's tokens are received: commit what was accepted of its drafts, and cut the tails."""
        if not step.has_drafts:
            return
        turns = [w.turn for w in step.work if w.draft is not None and w.turn.turn_id in self.running]
        lens = {turn: self.cache.slots[turn.session_id].committed_len for turn in turns}
        self.cache.commit({t.session_id: t.tokens[n:-1] for t, n in lens.items() if n < len(t.tokens) - 1})
        self.cache.cut_tails([turn.session_id for turn in turns])

    def finish(self, turn: Turn, outcome: Outcome) -> None:
        """End a turn that is waiting, running or retracted (law L7). Idempotent."""
        if self.turns.pop(turn.turn_id, None) is None:
            return
        turn.ended = True
        if self.running.pop(turn.turn_id, None) is None:
            self.waiting.remove(turn)
        del self._busy[turn.session_id]
        slot = self.cache.slots.get(turn.session_id)
        known = turn.tokens[slot.committed_len :] if slot is not None else None
        self.cache.finish(turn.session_id, turn.turn_id, outcome, known)
        self._unblock()

    def made_room(self) -> None:
        """Pages were freed other than by a turn: the first waiting turn may fit now."""
        self._unblock()

    def turn_of(self, session_id: str) -> Turn | None:
        """The live turn of a session, running or waiting."""
        turn_id = self._busy.get(session_id)
        return self.turns[turn_id] if turn_id is not None else None

    # ---- inside ----------------------------------------------------------------------------------

    def _unblock(self) -> None:
        self._head_is_blocked = False
        self._blocked_scopes.clear()

    def _max_len(self, group: GroupTables, share_ppm: int) -> int:
        """The length up to which any turn can run alone in a share of the group's pool."""
        # One page is reserved for a copy on write.
        num_pages, size = limit_pages(group.pool.num_pages, share_ppm) - 1, self.cache.page_size
        if group.window and num_pages >= self.cache.pages_of_a_turn(group, self.limits.step_tokens):
            return self.limits.context_len
        return num_pages * size

    def _todo(self, turn: Turn) -> int:
        if turn.in_flight:  # all but that token is committed
            return 0 if turn.is_full else 1
        return len(turn.tokens) - self.cache.slots[turn.session_id].committed_len

    def _work(self, turn: Turn, count: int) -> Work:
        slot = self.cache.slots[turn.session_id]
        start = slot.committed_len
        scored, first = range(0), turn.first_unscored
        if first is not None:
            scored = range(max(start, first), min(start + count, turn.prompt_len - 1))
        return Work(turn, slot.row, start, count, start + count >= len(turn.tokens), scored=scored)

    def _plan_decodes(self, work: dict[str, Work]) -> None:
        slots = self.cache.slots  # inlines ``_todo`` and ``_work``: this runs for every turn in most steps
        decodes = [
            t
            for t in self.running.values()
            if (
                len(t.tokens) + 1 < t.end_len if t.in_flight else len(t.tokens) - slots[t.session_id].committed_len == 1
            )
        ]
        decodes.sort(key=attrgetter("arrival"))
        while decodes:
            num_done = self.cache.extend_by_one([turn.session_id for turn in decodes])
            for turn in decodes[:num_done]:
                slot = slots[turn.session_id]
                work[turn.turn_id] = Work(turn, slot.row, slot.committed_len, 1, True)
            decodes = decodes[num_done:]
            if decodes:
                needy = decodes[0].scope.name
                beyond = self.cache.scopes_beyond_share(needy)
                last = self._last_running(beyond, needy if needy in beyond else None)
                self._retract(last, work)
                decodes = [turn for turn in decodes if turn is not last]

    def _last_running(self, beyond: Collection[str], scope: str | None = None) -> Turn:
        """The turn to retract next (of a scope): the youngest; background first, then those ``beyond`` a share."""
        turns = [turn for turn in self.running.values() if scope in (None, turn.scope.name)]
        return max(turns, key=lambda turn: (turn.params.background, turn.scope.name in beyond, turn.arrival))

    def _retract(self, turn: Turn, work: dict[str, Work]) -> None:
        work.pop(turn.turn_id, None)
        del self.running[turn.turn_id]
        self.cache.finish(turn.session_id, turn.turn_id, Outcome.RETRACTED)
        turn.keep_len = len(self.cache.slots[turn.session_id].tokens)
        self.waiting.appendleft(turn)
        self.num_retracted += 1

    def _plan_prefills(self, work: dict[str, Work], budget: int) -> None:
        """Share the budget among the running prefills: a long prompt must not delay a short one.

        Background turns share what the others leave.
        """
        todo = [turn for turn in self.running.values() if turn.turn_id not in work]
        for background in (False, True):
            prefills = sorted((turn for turn in todo if turn.params.background == background), key=self._todo)
            for left, turn in zip(range(len(prefills), 0, -1), prefills, strict=True):
                count = min(self._todo(turn), -(-budget // left)) if turn.turn_id in self.running else 0
                if count > 0 and self._extend_windows(turn, count, work):
                    work[turn.turn_id] = self._work(turn, count)
                    budget -= count

    def _extend_windows(self, turn: Turn, count: int, work: dict[str, Work]) -> bool:
        """Hold pages for a running prefill's next chunk in the window groups; the others hold the whole prompt's.

        Retracts turns until there is room. Returns False if ``turn`` was retracted itself.
        """
        while self.cache.windows and turn.turn_id in self.running:
            try:
                self.cache.extend(turn.session_id, count)
                return True
            except OutOfPages as lack:
                beyond = self.cache.scopes_beyond_share()
                self._retract(self._last_running(beyond, _scope_that_lacks(turn, lack)), work)
        return turn.turn_id in self.running

    def _plan_drafts(self, work: dict[str, Work], drafts: Drafts) -> bool:
        """Extend decodes by drafts, with what the step has left, into free pages alone. Returns whether there are any.

        A guess evicts nothing, retracts nothing, and delays no prefill.
        """
        num_rows = len(work)
        candidates = drafts.candidates(num_rows)
        if not candidates:
            return False
        budget = self.limits.step_tokens - sum(w.count for w in work.values())
        has_drafts = False
        for turn in candidates:
            w = work.get(turn.turn_id)
            if w is None or budget <= 0 or not w.samples or w.count != 1 or turn.in_flight:
                continue
            limit = min(budget, turn.end_len - len(turn.tokens) - 1)
            draft = drafts.propose(turn, limit, num_rows) if limit > 0 else None
            num_free = self.cache.free_positions(turn.session_id) - 1 if draft is not None else 0
            if draft is not None and num_free > 0:
                w.draft = draft.first(num_free)
                w.count += len(w.draft.tokens)
                budget -= len(w.draft.tokens)
                self.cache.extend(turn.session_id, w.count)
                has_drafts = True
        return has_drafts

    def _admit(self, work: dict[str, Work], budget: int) -> int:
        """Admit turns in order until ``budget`` tokens are planned. Returns how many were."""
        left = budget
        while self.waiting and left > 0:
            turn = self._next_waiting()
            if turn is None or turn.in_flight:
                break  # in flight: it was retracted just now, and may end with that token
            if self._head_is_blocked or not self._make_place(turn, work):
                break
            lack = self._make_pages(turn, left, work)
            if isinstance(lack, OutOfShare):
                self._blocked_scopes.add(turn.scope.name)
                continue
            if lack is not None:
                self._head_is_blocked = True
                break
            self.waiting.remove(turn)
            self.running[turn.turn_id] = turn
            count = min(self._todo(turn), left)
            work[turn.turn_id] = self._work(turn, count)
            left -= count
        return budget - left

    def _next_waiting(self) -> Turn | None:
        """The longest-waiting turn of the tenant with fewest running turns: one tenant must not block others."""
        running = Counter(turn.tenant for turn in self.running.values())
        waiting = self.waiting
        if self._blocked_scopes:
            waiting = deque(turn for turn in waiting if turn.scope.name not in self._blocked_scopes)
        return min(waiting, key=lambda turn: (turn.params.background, running[turn.tenant]), default=None)

    def _make_place(self, turn: Turn, work: dict[str, Work]) -> bool:
        """Whether the batch has room for a waiting turn, once background turns have made it."""
        while len(self.running) >= self.limits.max_running:
            if not self._yield_to(turn, work):
                return False
        return True

    def _make_pages(self, turn: Turn, budget: int, work: dict[str, Work]) -> OutOfPages | None:
        """As ``_take_pages``, once turns that yield have made room."""
        while (lack := self._take_pages(turn, budget)) is not None:
            beyond = self.cache.scopes_beyond_share()
            if not self._yield_to(turn, work, beyond, _scope_that_lacks(turn, lack)):
                break
        return lack

    def _yield_to(
        self, turn: Turn, work: dict[str, Work], beyond: Collection[str] = (), scope: str | None = None
    ) -> bool:
        """Retract a background turn (of a scope) for another, or one ``beyond`` its share for one within it."""
        if not any(scope in (None, other.scope.name) for other in self.running.values()):
            return False
        last = self._last_running(beyond, scope)
        for_a_share = last.scope.name in beyond and turn.scope.name not in beyond
        if (turn.params.background or not last.params.background) and not for_a_share:
            return False
        self._retract(last, work)
        return True

    def _take_pages(self, turn: Turn, budget: int) -> OutOfPages | None:
        """Resume the turn's slot and hold pages for its whole prompt, or change nothing and return what is lacking.

        Window groups hold pages for the first ``budget`` tokens: the next chunks reuse what the window frees.
        """
        cache = self.cache
        try:
            slot = cache.open(turn.session_id, turn.tenant, scope=turn.scope, ephemeral=turn.ephemeral)
        except OutOfPages as lack:
            return lack
        keep_len = min(turn.keep_len, len(slot.tokens))
        scores_from = turn.first_unscored
        if scores_from is not None:
            # Logprobs of cached tokens need their logits, which must be computed again.
            keep_len = min(keep_len, scores_from)
        cached_len = cache.resume(
            turn.session_id, turn.turn_id, turn.tokens, keep_len, match_prefix=scores_from is None
        )
        try:
            num_missing = len(turn.tokens) - cached_len
            if cache.windows and num_missing > budget:
                cache.reserve(turn.session_id, num_missing)
                num_missing = budget
            cache.extend(turn.session_id, num_missing)
        except OutOfPages as lack:
            cache.finish(turn.session_id, turn.turn_id, Outcome.RETRACTED)
            return lack
        if turn.cached_len is None:
            turn.cached_len = cached_len
        else:
            self.num_recomputed += max(0, turn.keep_len - cached_len)
        return None


def _scope_that_lacks(turn: Turn, lack: OutOfPages) -> str | None:
    """The scope whose turns alone can make room; None: any can."""
    return turn.scope.name if isinstance(lack, OutOfShare) else None
