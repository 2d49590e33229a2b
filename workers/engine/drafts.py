"""Drafts for a leader's turns: proposed by ``scheduling.speculation``, and cut to what a turn's grammar allows."""

from __future__ import annotations

from collections import Counter

from holdfast.errors import ConfigError
from workers.grammar.turns import TurnGrammars
from workers.scheduling import Draft, Speculation, Step, Turn, Work

ALGORITHMS = ("NONE", "NGRAM")
PLAIN_STEPS = 4
"""One of so many steps without drafts is measured."""


class TurnDrafts:
    """One worker's drafts, for its leader's thread. With the algorithm NONE there are none, and nothing is followed.

    Raises ConfigError for an unknown algorithm.
    """

    def __init__(self, algorithm: str, max_draft: int, grammars: TurnGrammars, counters: Counter[str]) -> None:
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"speculative_algorithm: {algorithm!r} is not one of {', '.join(ALGORITHMS)}")
        self.speculation = Speculation(max_draft) if algorithm == "NGRAM" else None
        self._num_plain = 0
        self._grammars = grammars
        self._counters = counters

    def begin(self, turn: Turn) -> None:
        """A turn is queued."""
        if self.speculation is not None:
            self.speculation.begin(turn)

    def candidates(self) -> list[Turn]:
        """See ``scheduling.Drafts``."""
        return self.speculation.candidates() if self.speculation is not None else []

    def propose(self, turn: Turn, limit: int, num_rows: int) -> Draft | None:
        """See ``scheduling.Drafts``."""
        assert self.speculation is not None, "there is no candidate"
        draft = self.speculation.propose(turn, limit, num_rows)
        if draft is None:
            return None
        num_allowed = self._grammars.allowed(turn, draft.tokens)
        return draft.first(num_allowed) if num_allowed else None

    def need_results(self, launched: Step) -> bool:
        """Whether a step's results must be known before the next is planned.

        It has drafts: how far its turns got is not known before. Or a draft would pay, for which a turn's last token
        must be known.
        """
        if self.speculation is None:
            return False
        if any(work.draft is not None for work in launched.work):
            return True
        return self.speculation.pays(len(launched.work))

    def receive(self, work: Work, num_received: int, num_accepted: int) -> None:
        """A turn has this many new tokens; so many of its draft were right, of which its end may have left out some."""
        if self.speculation is None:
            return
        accepted = min(num_received, num_accepted)
        self.speculation.receive(work.turn, work.draft, accepted)
        if work.draft is not None:
            drafter = "prediction" if work.draft.is_predicted else "ngram"
            self._counters[f"verify_steps_{drafter}"] += 1
            self._counters[f"draft_tokens_{drafter}"] += len(work.draft.tokens)
            self._counters[f"accepted_draft_tokens_{drafter}"] += accepted

    def measure(self, step: Step, seconds: float) -> None:
        """What a step cost, from the results before it to its own."""
        if self.speculation is None:
            return
        drafts = any(work.draft is not None for work in step.work)
        self._num_plain += not drafts
        # Steps without drafts are alike, and there is little to learn from each.
        is_sample = drafts or self._num_plain % PLAIN_STEPS == 0
        if is_sample and all(work.samples and work.num_known == 1 for work in step.work):
            self.speculation.costs.observe(sum(work.count for work in step.work), seconds)

    def forget(self, turn: Turn) -> None:
        """The turn has ended."""
        if self.speculation is not None:
            self.speculation.forget(turn)

    def release(self, session_id: str) -> None:
        """Nothing of a released session is kept."""
        if self.speculation is not None:
            self.speculation.release(session_id)
