"""How many tokens a draft model proposes for each turn, and what it has computed of them.

A draft model runs once for each token that it proposes, for all turns at once, so a token must yield more than its
share of that run and of the step that verifies it (see ``speculation``). Where it does not pay, the model is left alone
and falls behind; from time to time a short draft finds out whether it pays again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from workers.scheduling.speculation import MARGIN, TOKEN_DECAY, Draft, StepCosts, count_drafts
from workers.scheduling.step import Work
from workers.scheduling.turn import Turn

PRIOR_RATE, PRIOR_WEIGHT = 0.7, 3.0
"""How often a drafted token is first thought to be right, and how many tokens that weighs."""
WORKER_DECAY = 0.98
"""How fast the old tokens of all turns lose their weight; what is left of them is where a new turn starts from."""
PROBE_TOKENS, PROBE_INTERVALS = 2, (64, 4096)
"""The length of a draft that finds out, and the tokens of all turns between two of them: twice as many after each that
did not pay, within these bounds."""
RUN_WEIGHT = 0.1
"""Of the draft model's last run among all of them."""
MAX_SESSIONS = 4096
"""Sessions of which is known what the draft model has computed."""
UNKNOWN_TAIL = 32
"""Of others, which came from another worker or begin with a cached prefix, it is taken to have computed all but so many
tokens: a turn ends with some that it has not. They are computed again, into pages that others may hold too: what the
draft model computes of the same tokens is the same."""

MAX_HEAD_LAG = 32
"""Tokens of a turn that a draft head may be behind the model."""
PROBE_TURNS = 16
"""One of so many turns finds out whether a head pays, where it did not pay for the others."""


@dataclass(frozen=True, slots=True)
class DraftJob:
    """What a draft model computes of a turn in a step: tokens ``[start, end)``, then ``num_draft`` of its own."""

    turn: Turn
    row: int
    start: int
    end: int
    num_draft: int


@dataclass(slots=True)
class _Drafting:
    """A live turn."""

    computed_len: int | None
    """Tokens that the draft model has computed; None: not known."""
    hits: float
    trials: float = PRIOR_WEIGHT
    pays: bool = True
    """Whether a draft paid when that was last looked at. If not, the draft model does not follow."""
    finds_out: bool = False
    """A head follows it to its end."""


class ModelSpeculation:
    """Plans a draft model's work for a scheduler. For one thread; the clock's readings are arguments."""

    def __init__(self, max_draft: int, max_lag: int) -> None:
        """``max_lag``: tokens that the draft model computes of a turn in one step."""
        self.max_draft, self._max_lag = max_draft, max_lag
        self._tail = min(UNKNOWN_TAIL, max_lag - 1)
        self.costs = StepCosts()
        self._run_s = 0.0
        self._hits, self._trials = PRIOR_RATE * PRIOR_WEIGHT, PRIOR_WEIGHT
        self._since_draft, self._probe_interval = 0, PROBE_INTERVALS[0]
        self._turns: dict[Turn, _Drafting] = {}
        self._computed: OrderedDict[str, int] = OrderedDict()

    def begin(self, turn: Turn) -> None:
        """A turn is queued."""
        hits = PRIOR_WEIGHT * self._hits / self._trials
        drafting = self._turns[turn] = _Drafting(self._computed.pop(turn.session_id, None), hits)
        drafting.pays = self._num_paying(drafting, 1) > 0

    def candidates(self, num_rows: int) -> list[Turn]:
        """The turns for which there may be a draft, however many rows the step has."""
        probes = self._since_draft >= self._probe_interval
        return [turn for turn, drafting in self._turns.items() if drafting.pays or probes]

    def propose(self, turn: Turn, limit: int, num_rows: int) -> Draft | None:
        """A draft whose tokens are still to be computed, at most ``limit``."""
        drafting = self._turns[turn]
        probes = self._since_draft >= self._probe_interval
        lag = len(turn.tokens) - drafting.computed_len if drafting.computed_len is not None else 1 + self._tail
        if lag > self._max_lag:
            drafting.pays |= probes  # it catches up first
            return None
        count = self._num_paying(drafting, num_rows)
        drafting.pays = count > 0
        if not count and probes:
            count, self._since_draft = min(PROBE_TOKENS, self.max_draft), 0
            self._probe_interval = min(2 * self._probe_interval, PROBE_INTERVALS[1])
        elif count:
            self._probe_interval = PROBE_INTERVALS[0]
        return Draft(array("i", bytes(4 * min(count, limit)))) if count else None

    def jobs(self, work: Iterable[Work]) -> list[DraftJob]:
        """What the draft model has to compute in a step: drafts, and what it needs for drafts to come."""
        jobs = []
        for w in work:
            drafting = self._turns[w.turn]
            start, end = self._missing(w, drafting)
            if not w.turn.in_flight and (w.draft or self._follows(w.turn, drafting, end - start)):
                num_draft = len(w.draft.tokens) if w.draft is not None else 0
                jobs.append(DraftJob(w.turn, w.row, start, min(end, start + self._max_lag), num_draft))
        return jobs

    def computed(self, jobs: Iterable[DraftJob], num_runs: int, seconds: float) -> None:
        """The draft model has done its jobs, in so many runs."""
        for job in jobs:
            self._turns[job.turn].computed_len = job.end
        if num_runs and all(job.end - job.start <= 2 for job in jobs):  # else it has caught up, too
            run_s = seconds / num_runs
            self._run_s += (RUN_WEIGHT if self._run_s else 1.0) * (run_s - self._run_s)

    def _missing(self, work: Work, drafting: _Drafting) -> tuple[int, int]:
        """The tokens that the draft model can compute and has not."""
        start = max(0, work.start - self._tail)
        if drafting.computed_len is not None:
            start = min(work.start, drafting.computed_len)
        return start, work.start + work.num_known

    def _follows(self, turn: Turn, drafting: _Drafting, lag: int) -> bool:
        """Whether the draft model computes a turn's tokens in a step without a draft."""
        return drafting.pays

    def pays(self, num_rows: int) -> bool:
        """Whether a draft would pay for some turn whose next token is in flight: it must be known first."""
        turns = self._turns.items()
        return any(turn.in_flight and each.pays and self._num_paying(each, num_rows) for turn, each in turns)

    def receive(self, turn: Turn, draft: Draft | None, num_accepted: int) -> None:
        """A turn has its tokens of a step, of whose draft the first ``num_accepted`` are among them."""
        drafting = self._turns[turn]
        if draft is None:
            self._since_draft += 1
            return
        count_drafts(turn, draft, num_accepted)
        num_trials = min(num_accepted + 1, len(draft.tokens))
        decay = TOKEN_DECAY**num_trials
        drafting.hits = decay * drafting.hits + num_accepted
        drafting.trials = decay * drafting.trials + num_trials
        decay = WORKER_DECAY**num_trials
        self._hits, self._trials = decay * self._hits + num_accepted, decay * self._trials + num_trials
        drafting.pays = self._num_paying(drafting, 1) > 0
        self._keep_drafted(drafting, draft, num_accepted)

    def _keep_drafted(self, drafting: _Drafting, draft: Draft, num_accepted: int) -> None:
        """KV of the draft's last token was not computed, nor is that of what was not accepted right."""
        assert drafting.computed_len is not None
        drafting.computed_len += min(num_accepted, len(draft.tokens) - 1)

    def forget(self, turn: Turn) -> None:
        """The turn has ended."""
        drafting = self._turns.pop(turn, None)
        if drafting is None or turn.is_given_up or turn.ephemeral:
            return
        if drafting.computed_len is not None:
            self._computed[turn.session_id] = drafting.computed_len
            if len(self._computed) > MAX_SESSIONS:
                self._computed.popitem(last=False)

    def release(self, session_id: str) -> None:
        """The session is released."""
        self._computed.pop(session_id, None)

    def _least(self, num_rows: int) -> float:
        """The chance from which on a token pays."""
        return MARGIN * self.costs.break_even(num_rows, self._run_s)

    def _num_paying(self, drafting: _Drafting, num_rows: int) -> int:
        least = self._least(num_rows)
        rate = drafting.hits / drafting.trials
        chance, count = rate, 0
        while chance >= least and count < self.max_draft:
            chance *= rate
            count += 1
        return count


class HeadSpeculation(ModelSpeculation):
    """Of a draft head. A token of its is computed from the model's state one position before.

    So it computes what the model has computed, a step later: tokens up to the first that the model computes now. Only
    so many states are kept: where it does not pay for a turn, it still follows in pieces of ``MAX_HEAD_LAG`` tokens.
    Where it pays for none, it gives up all turns but a few.
    """

    def __init__(self, max_draft: int, max_lag: int) -> None:
        super().__init__(max_draft, max_lag)
        self._tail = 0  # what came with a prefix is as good as what can be computed without its states
        self._num_turns = 0

    def begin(self, turn: Turn) -> None:
        """See ``ModelSpeculation``."""
        super().begin(turn)
        self._turns[turn].finds_out = self._num_turns % PROBE_TURNS == 0
        self._num_turns += 1

    def candidates(self, num_rows: int) -> list[Turn]:
        """See ``ModelSpeculation``. Before a turn's second token there is no state."""
        return [turn for turn in super().candidates(num_rows) if len(turn.tokens) > 1 and not turn.is_given_up]

    def pays(self, num_rows: int) -> bool:
        """See ``ModelSpeculation``. Or a turn has a piece of tokens for which states are kept."""
        followed = ((turn, each) for turn, each in self._turns.items() if turn.in_flight and not turn.is_given_up)
        lags = (len(turn.tokens) - (each.computed_len or 0) for turn, each in followed)
        return any(lag >= MAX_HEAD_LAG for lag in lags) or super().pays(num_rows)

    def _missing(self, work: Work, drafting: _Drafting) -> tuple[int, int]:
        known = drafting.computed_len
        drafting.computed_len = work.start if known is None else min(known, work.start)
        return drafting.computed_len, work.start + 1

    def _follows(self, turn: Turn, drafting: _Drafting, lag: int) -> bool:
        if not drafting.pays and not drafting.finds_out and self._hits < self._least(1) * self._trials:
            turn.is_given_up = True
        return not turn.is_given_up and (drafting.pays or lag >= MAX_HEAD_LAG)

    def _keep_drafted(self, drafting: _Drafting, draft: Draft, num_accepted: int) -> None:
        """None of its drafts' KV: what it computes from the model's states replaces that."""
