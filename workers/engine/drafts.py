"""Drafts for a leader's turns: looked up or computed, and cut to what a turn's grammar allows."""

from __future__ import annotations

import sys
import time
from collections import Counter

from holdfast.errors import ConfigError
from workers.config import EngineConfig
from workers.engine.draft_model import STANDALONE
from workers.engine.rank import Rank
from workers.grammar.turns import TurnGrammars
from workers.models.heads import EAGLE3, MTP
from workers.scheduling import Draft, Speculation, Step, Turn, Work
from workers.scheduling.model_speculation import HeadSpeculation, ModelSpeculation
from workers.scheduling.speculation import GRAMMAR

NGRAM = "NGRAM"
DRAFTERS = {NGRAM: "ngram", STANDALONE: "model", EAGLE3: "head", MTP: "head"}
"""What computes an algorithm's drafts, as counters call it."""
PLAIN_STEPS = 8
"""One of so many steps without drafts is measured."""


class TurnDrafts:
    """One worker's drafts, for its leader's thread. With the algorithm NONE there are none, and nothing is followed.

    Raises ConfigError for an unknown algorithm.
    """

    def __init__(self, config: EngineConfig, rank: Rank, grammars: TurnGrammars, counters: Counter[str]) -> None:
        algorithm, max_draft = config.speculative_algorithm, config.speculative_num_draft_tokens
        if algorithm not in ("NONE", *DRAFTERS):
            raise ConfigError(f"speculative_algorithm: {algorithm!r} is not one of NONE, {', '.join(DRAFTERS)}")
        self._drafter = DRAFTERS.get(algorithm, "")
        kinds = {"model": ModelSpeculation, "head": HeadSpeculation}
        kind = kinds.get(self._drafter)
        self._model = kind(max_draft, rank.step_tokens) if kind is not None else None
        self.speculation = Speculation(max_draft) if algorithm == NGRAM else self._model
        self._rank = rank
        self._num_plain, self._computing_s = 0, 0.0
        self._grammars = grammars
        grammars.looks_ahead = algorithm == NGRAM
        self._counters = counters

    def begin(self, turn: Turn) -> None:
        """A turn is queued."""
        if self.speculation is None:
            turn.look_at = sys.maxsize
        else:
            self.speculation.begin(turn)

    def candidates(self, num_rows: int) -> list[Turn]:
        """See ``scheduling.Drafts``."""
        if self.speculation is None:
            return []
        found, forced = self.speculation.candidates(num_rows), self._grammars.forced
        # Each once, in an order that does not depend on chance.
        return list(dict.fromkeys([*found, *forced])) if forced else found

    def propose(self, turn: Turn, limit: int, num_rows: int) -> Draft | None:
        """See ``scheduling.Drafts``."""
        assert self.speculation is not None, "there is no candidate"
        draft = self.speculation.propose(turn, limit, num_rows)
        if self._model is not None:
            return draft
        draft = self._with_forced(turn, draft, min(limit, self.speculation.max_draft), num_rows)
        return self._allowed(turn, draft) if draft is not None else None

    def _with_forced(self, turn: Turn, draft: Draft | None, limit: int, num_rows: int) -> Draft | None:
        """The tokens in which the turn's grammar leaves no choice, unless what was looked up has all of them."""
        forced = self._grammars.forced.get(turn)
        if forced is None or not self._certainty_pays(num_rows):
            return draft
        if draft is not None and draft.tokens[: len(forced)] == forced:
            return draft
        return Draft(forced[:limit], GRAMMAR)

    def _certainty_pays(self, num_rows: int) -> bool:
        return isinstance(self.speculation, Speculation) and self.speculation.certainty_pays(num_rows)

    def compute(self, step: Step) -> None:
        """Have a draft model compute the drafts that are planned. The step's page tables are on the device."""
        if self._model is None:
            return
        jobs, self._computing_s = self._model.jobs(step.work), 0.0
        if not jobs:
            return
        began = time.monotonic()
        drafts, num_runs = self._rank.draft(jobs)
        self._computing_s = time.monotonic() - began
        self._model.computed(jobs, num_runs if drafts else 0, self._computing_s)
        for work in step.work:
            if work.draft is not None:
                work.count = work.num_known
                work.draft = self._allowed(work.turn, Draft(drafts[work.turn.turn_id]))
                work.count += len(work.draft.tokens) if work.draft is not None else 0

    def _allowed(self, turn: Turn, draft: Draft) -> Draft | None:
        """What the turn's grammar allows of a draft, up to an end token: that is chosen, if it is, after the draft."""
        count = turn.num_before_end(draft.tokens)
        count = min(count, self._grammars.allowed(turn, draft.tokens[:count]))
        return draft.first(count) if count else None

    def need_results(self, launched: Step) -> bool:
        """Whether a step's results must be known before the next is planned.

        It has drafts: how far its turns got is not known before. Or a draft would pay, for which a turn's last token
        must be known.
        """
        if self.speculation is None:
            return False
        if launched.has_drafts:
            return True
        num_rows = len(launched.work)
        follows = any(turn.in_flight and len(tokens) > 1 for turn, tokens in self._grammars.forced.items())
        return self.speculation.pays(num_rows) or (follows and self._certainty_pays(num_rows))

    def receive(self, work: Work, num_received: int, num_accepted: int) -> None:
        """A turn has this many new tokens; so many of its draft were right, of which its end may have left out some.

        Without a draft it is not called before a turn's ``look_at``.
        """
        assert self.speculation is not None
        accepted = min(num_received, num_accepted)
        self.speculation.receive(work.turn, work.draft, accepted)
        if work.draft is not None:
            drafter = work.draft.source or self._drafter
            self._counters[f"verify_steps_{drafter}"] += 1
            self._counters[f"draft_tokens_{drafter}"] += len(work.draft.tokens)
            self._counters[f"accepted_draft_tokens_{drafter}"] += accepted

    def measure(self, step: Step, seconds: float) -> None:
        """What a step cost, from the results before it to its own."""
        if self.speculation is None:
            return
        if not step.has_drafts:
            # Such steps are alike, and there is little to learn from each.
            self._num_plain += 1
            if self._num_plain % PLAIN_STEPS:
                return
        if all(work.samples and work.num_known == 1 for work in step.work):
            self.speculation.costs.observe(sum(work.count for work in step.work), seconds - self._computing_s)

    def forget(self, turn: Turn) -> None:
        """The turn has ended."""
        if self.speculation is not None:
            self.speculation.forget(turn)

    def release(self, session_id: str) -> None:
        """Nothing of a released session is kept."""
        if self.speculation is not None:
            self.speculation.release(session_id)
