"""A step as it is planned: which turns compute which tokens, and the limits of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.kv import PageCopy, TableUpdate
from workers.scheduling.speculation import Draft
from workers.scheduling.turn import Turn


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one worker, each with what happens beyond it."""

    context_len: int
    """Tokens of one sequence, prompt and output. A longer prompt is refused; output ends here."""
    step_tokens: int = 512
    """Tokens computed in a step. Longer prompts are computed in chunks, which limits how long decodes wait."""
    max_running: int = 32
    """Turns in a step. More turns wait."""
    max_waiting: int = 256
    """Waiting turns. More are refused with QueueFull."""


@dataclass(slots=True)
class Work:
    """One turn's share of a step: tokens ``[start, start + count)``."""

    turn: Turn
    row: int
    """The turn's row in the page tables."""
    start: int
    count: int
    samples: bool
    """Whether the share reaches the last token, whose logits give the next one."""
    draft: Draft | None = None
    """What the share's last tokens are a guess of: each of them, and the token before, has logits that choose."""
    scored: range = range(0)
    """Positions of this share whose logits score an input token, the one after each."""

    @property
    def num_known(self) -> int:
        """The tokens of the share that are no guess."""
        return self.count - (len(self.draft.tokens) if self.draft is not None else 0)

    @property
    def num_samples(self) -> int:
        """How many tokens it chooses: one, and one after each token of a draft."""
        return self.samples * (1 + self.count - self.num_known)


@dataclass(slots=True)
class Step:
    """One step of a rank: first the copies and table updates, then the work as one batch."""

    work: list[Work] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    table_updates: list[TableUpdate] = field(default_factory=list)
    has_drafts: bool = False
    """Whether drafts were planned. Most steps have none, and need not look for them."""
