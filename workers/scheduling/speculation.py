"""How many drafted tokens a step verifies, and what became of them.

A draft token is worth its place in a step if the chance that it is accepted is greater than its share of the step's
cost: with ``cost = base + slope * tokens``, a step of ``n`` rows yields ``n`` tokens without drafts, so one more must
yield more than ``slope * n / cost``. The chance is measured for each turn, the cost for the worker; both change with
what is said and how busy the worker is, so drafts come and go by themselves.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from workers.scheduling.drafter import SEPARATOR, NgramDrafter
from workers.scheduling.ngram import Match
from workers.scheduling.turn import DraftCounts, Turn

MATCH_LENS, PRIOR_RATES = (6, 16), (0.4, 0.7, 0.9)
"""Matches shorter than the first, than the second, and longer ones; and how often they are first thought to hold."""
PRIOR_WEIGHT = 2.0
TOKEN_DECAY, WORKER_DECAY = 0.95, 0.98
"""How fast the old tokens of a turn, and of all turns, lose their weight."""
STEP_WEIGHT = 0.1
"""Of the last step among all steps that were measured."""
MARGIN = 1.15
"""A draft must be worth this much more than it costs: its chance and its cost are estimates."""
PRIOR_SHARE, PRIOR_SPREAD = 0.15, 0.25
"""Of the cost of a step with one token, what is the token's, as first thought; and over which spread of steps' tokens,
as a part of their mean, a measurement weighs as much as that thought."""
LOOK_AGAIN = 8
"""Tokens until a match is looked at again that is not worth a draft: in a large batch, that is most of the time."""
MAX_SURPRISE = 1.5
"""A step that took longer than this many times the expected was delayed by something else."""


PREDICTION, GRAMMAR = "prediction", "grammar"
"""What drafts may come from, beside the drafter that a worker has: what the request predicts, what it leaves no choice
in."""


class Draft(NamedTuple):
    """Tokens that may follow a turn's last one."""

    tokens: array[int]
    source: str = ""
    """``PREDICTION`` or ``GRAMMAR``; empty: the worker's drafter."""

    def first(self, count: int) -> Draft:
        """Its first tokens, at most ``count``."""
        return self if count >= len(self.tokens) else Draft(self.tokens[:count], self.source)

    def accepted(self, samples: Sequence[int]) -> int:
        """How many of its tokens are right, given what was chosen in their places."""
        drafted = self.tokens.tolist()
        if drafted == samples[: len(drafted)]:
            return len(drafted)
        return next(i for i, (a, b) in enumerate(zip(drafted, samples, strict=False)) if a != b)


def count_drafts(turn: Turn, draft: Draft, num_accepted: int) -> None:
    """A step has verified a turn's draft."""
    turn.drafts = turn.drafts or DraftCounts()
    turn.drafts.add(len(draft.tokens), num_accepted, is_predicted=draft.source == PREDICTION)


class StepCosts:
    """A step's seconds by its number of tokens: a line through the last steps.

    What is not measured any more is forgotten: after a while without drafts they are given another chance.
    """

    def __init__(self) -> None:
        self._n = self._t = self._variance = self._covariance = 0.0
        self.slope = 0.0
        """Seconds of one token more: at least nothing, at most a token's share of all."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step without prefills took this long, from the results before it to its own."""
        if not self._t:
            self._n, self._t = num_tokens, seconds
        seconds = min(seconds, MAX_SURPRISE * self.cost(num_tokens))
        dn, dt = num_tokens - self._n, seconds - self._t
        self._n += STEP_WEIGHT * dn
        self._t += STEP_WEIGHT * dt
        self._variance = (1 - STEP_WEIGHT) * (self._variance + STEP_WEIGHT * dn * dn)
        self._covariance = (1 - STEP_WEIGHT) * (self._covariance + STEP_WEIGHT * dn * dt)
        prior, weight = self._t / (self._n + 1 / PRIOR_SHARE - 1), (PRIOR_SPREAD * self._n) ** 2
        slope = (self._covariance + weight * prior) / (self._variance + weight)
        self.slope = min(max(0.0, slope), self._t / self._n)

    def cost(self, num_tokens: int) -> float:
        """Seconds of a step."""
        return self._t + self.slope * (num_tokens - self._n)

    def break_even(self, num_rows: int, draft_s: float = 0.0) -> float:
        """The chance from which on a token more of each row pays in a step of ``num_rows``, which may be none.

        ``draft_s``: what it takes to propose them.
        """
        cost = self.cost(num_rows) if self._t else 0.0
        if cost <= 0.0:  # nothing is measured, or such a step costs nothing
            return num_rows / (num_rows + 1 / PRIOR_SHARE - 1)
        return (self.slope * num_rows + draft_s) / cost


class _Rates:
    """How often matches hold for another token, by their length."""

    def __init__(self, prior: Iterable[float], decay: float) -> None:
        self._hits = [PRIOR_WEIGHT * rate for rate in prior]
        self._trials = [PRIOR_WEIGHT] * len(self._hits)
        self._decay = decay

    def of(self, length: int) -> float:
        i = bisect_right(MATCH_LENS, length)
        return self._hits[i] / self._trials[i]

    def all(self) -> list[float]:
        return [hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)]

    def observe(self, length: int, held: int, lost: bool) -> None:
        """A match of this length held for ``held`` tokens, and did not for the next: ``lost``."""
        hits, trials, decay = self._hits, self._trials, self._decay
        end = length + held
        while length < end:
            i = bisect_right(MATCH_LENS, length)
            next_length = min(end, MATCH_LENS[i]) if i < len(MATCH_LENS) else end
            # As many times: what there was loses weight, and a hit is added.
            kept = decay ** (next_length - length)
            hits[i] = kept * hits[i] + (1.0 - kept) / (1.0 - decay)
            trials[i] = kept * trials[i] + (1.0 - kept) / (1.0 - decay)
            length = next_length
        if lost:
            i = bisect_right(MATCH_LENS, end)
            hits[i] *= decay
            trials[i] = decay * trials[i] + 1.0


class Speculation:
    """Proposes drafts for a scheduler, as many tokens as pay. For one thread; the clock's readings are arguments."""

    def __init__(self, max_draft: int) -> None:
        self.max_draft = max_draft
        self.costs = StepCosts()
        self._drafter = NgramDrafter()
        self._rates: dict[Turn, _Rates] = {}
        self._paying = 0.0
        """The chance from which on a draft paid in the last step."""
        self._all_rates = _Rates(PRIOR_RATES, WORKER_DECAY)
        """Of all turns: what a new one starts from."""

    def begin(self, turn: Turn) -> None:
        """A turn is queued."""
        self._drafter.begin(turn)
        self._rates[turn] = _Rates(self._all_rates.all(), TOKEN_DECAY)

    def candidates(self, num_rows: int) -> list[Turn]:
        """The turns for which a draft pays in a step of ``num_rows`` turns."""
        matches = self._drafter.matches
        if not matches:
            return []
        rates, least = self._rates, self._least(num_rows)
        self._paying = least
        return [turn for turn, match in matches.items() if rates[turn].of(match.length) >= least]

    def propose(self, turn: Turn, limit: int, num_rows: int) -> Draft | None:
        """What may follow a turn's tokens, at most ``limit`` tokens, in a step of ``num_rows`` turns."""
        matches = self._drafter.matches
        if turn in matches and self._drafter.is_behind(turn):
            self._follow(turn)
        match = matches.get(turn)
        if match is None:
            return None
        count = min(limit, self._num_paying(turn, match, num_rows))
        if not count:
            return None
        tokens = match.draft(count)
        if SEPARATOR in tokens:
            del tokens[tokens.index(SEPARATOR) :]
        return Draft(tokens, PREDICTION if self._drafter.is_predicted(turn, match) else "") if tokens else None

    def certainty_pays(self, num_rows: int) -> bool:
        """Whether a draft pays whose tokens are all right."""
        return self._least(num_rows) <= 1.0

    def pays(self, num_rows: int) -> bool:
        """Whether a draft would pay for some turn whose next token is in flight: it must be known first."""
        matches = self._drafter.matches.items()
        return any(turn.in_flight and self._num_paying(turn, match, num_rows) > 1 for turn, match in matches)

    def receive(self, turn: Turn, draft: Draft | None, num_accepted: int) -> None:
        """A turn has its tokens of a step, of whose draft the first ``num_accepted`` are among them."""
        self._follow(turn)
        if draft is not None:
            count_drafts(turn, draft, num_accepted)

    def _follow(self, turn: Turn) -> None:
        """Look at the turn's new tokens: whether its match holds, or where there is another."""
        length, held, lost = self._drafter.receive(turn)
        rates = self._rates[turn]
        if length:
            rates.observe(length, held, lost)
            self._all_rates.observe(length, held, lost)
        match = self._drafter.matches.get(turn)
        if match is not None and rates.of(match.length) < self._paying:
            turn.look_at = len(turn.tokens) + LOOK_AGAIN

    def forget(self, turn: Turn) -> None:
        """The turn has ended."""
        self._drafter.forget(turn)
        self._rates.pop(turn, None)

    def release(self, session_id: str) -> None:
        """The session is released."""
        self._drafter.release(session_id)

    def _least(self, num_rows: int) -> float:
        """The chance that a drafted token must have."""
        return MARGIN * self.costs.break_even(num_rows)

    def _num_paying(self, turn: Turn, match: Match, num_rows: int) -> int:
        rates, least = self._rates[turn].all(), self._least(num_rows)
        chance = 1.0
        for length in range(match.length, match.length + self.max_draft):
            chance *= rates[bisect_right(MATCH_LENS, length)]
            if chance < least:
                return length - match.length
        return self.max_draft
