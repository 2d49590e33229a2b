"""How fast a worker's steps are, as its leader sees their results arrive."""

from __future__ import annotations

import time

PREFILL_TOKENS = 128
"""A step of at least this many tokens measures prefill speed; a smaller one measures a step's overhead."""


class Pace:
    """For the step loop's thread."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        """A moving average; 0 before the first measurement."""
        self._collected_at = 0.0

    def idle(self) -> None:
        """The loop waits for work: the next step's results do not follow from the last one's."""
        self._collected_at = 0.0

    def collected(self, num_tokens: int, began: float) -> float | None:
        """A step that computed so many tokens has its results.

        Returns the seconds since those of the step before, if the loop was busy.
        """
        now, before = time.monotonic(), self._collected_at
        self._collected_at = now
        seconds = now - max(began, before)
        if num_tokens >= PREFILL_TOKENS and seconds > 0:
            average = self.prefill_tokens_per_s or num_tokens / seconds
            self.prefill_tokens_per_s = 0.5 * (average + num_tokens / seconds)
        return now - before if before else None
