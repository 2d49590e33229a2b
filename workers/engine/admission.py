"""How a submission becomes a turn: its whole input, checked, and its place in the queue."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from holdfast.errors import HoldfastError
from workers.engine.drafts import TurnDrafts
from workers.engine.messages import Submission, check_tokens
from workers.engine.outputs import Outputs
from workers.engine.rank import Rank
from workers.grammar.matcher import Matcher
from workers.grammar.stop_patterns import StopPatterns
from workers.kv import KVScope
from workers.kv.prefix import common_prefix_len
from workers.scheduling import Finish, Scheduler, Turn

MIN_LOAD_TOKENS = 128
"""A turn that lacks fewer tokens of KV is computed at once: that takes about as long as to ask."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A turn's tokens, whose KV may be in the node's store."""

    session_id: str
    epoch: int
    tenant: str
    scope: KVScope
    tokens: array[int]
    known_len: int = 0
    """Of how many the session has the KV here."""
    kv_nodes: tuple[str, ...] = ()
    """Other nodes that may have it."""


def wanted_by(submission: Submission, tokens: array[int], known_len: int = 0) -> Wanted:
    """What a turn with these tokens lacks."""
    s = submission
    return Wanted(s.session_id, s.epoch, s.tenant, s.scope, tokens, known_len, s.kv_nodes)


class Admission:
    """Queues turns with a scheduler. For the leader's thread."""

    load: Callable[[Wanted], Future[None]] | None = None
    """Loads KV into a session, as much as there is. Its futures end within a deadline, and without an error."""

    def __init__(self, rank: Rank, scheduler: Scheduler, outputs: Outputs, drafts: TurnDrafts) -> None:
        self._cache = rank.cache
        self._drafts = drafts
        self._scheduler = scheduler
        self._outputs = outputs
        self._vocab_size = rank.model_config.vocab_size

    def loading(self, submission: Submission) -> Future[None] | None:
        """What a turn should wait for; None: nothing."""
        if self.load is None or submission.ephemeral:
            return None
        found = self._whole_input(submission)
        if found is None or self._scheduler.turn_of(submission.session_id) is not None:
            return None
        tokens, keep_len = found
        slot = self._cache.slots.get(submission.session_id)
        known_len = min(keep_len, slot.committed_len) if slot is not None else 0
        if len(tokens) - known_len < MIN_LOAD_TOKENS or len(tokens) >= self._scheduler.max_len_of(submission.scope):
            return None
        return self.load(wanted_by(submission, tokens, known_len))

    def admit(
        self, submission: Submission, compiled: Matcher | StopPatterns | None
    ) -> tuple[Turn | None, Finish | None]:
        """The queued turn; None if this worker does not have the prefix that the submission refers to.

        A turn with a ``Finish`` is not queued: it replays one whose end was never reported, and nothing is
        left to compute. Raises InvalidRequest, PromptTooLong, SessionBusy or QueueFull.
        """
        found = self._whole_input(submission)
        if found is None:
            return None, None
        tokens, keep_len = found
        check_tokens(submission, tokens, self._vocab_size)
        ignores_eos = submission.params.ignore_eos
        turn = Turn(
            turn_id=submission.turn_id,
            session_id=submission.session_id,
            tenant=submission.tenant,
            scope=submission.scope,
            tokens=tokens,
            prompt_len=submission.prompt_len,
            keep_len=keep_len,
            params=submission.params,
            ephemeral=submission.ephemeral,
            prediction=submission.prediction,
            end_tokens=submission.params.stop_token_ids | (frozenset() if ignores_eos else self._outputs.eos),
            max_len=self._scheduler.max_len_of(submission.scope),
        )
        try:
            finish = self._outputs.begin(turn, compiled)
            if finish is None:
                self._scheduler.submit(turn)
                self._drafts.begin(turn)
        except HoldfastError:
            self._outputs.forget(turn)
            raise
        if finish is not None:
            self._outputs.forget(turn)
        return turn, finish

    def _whole_input(self, submission: Submission) -> tuple[array[int], int] | None:
        """All tokens of a turn, and how many of them the slot has; None if its prefix is not here."""
        slot = self._cache.slots.get(submission.session_id)
        if not submission.prefix_len:
            return submission.tokens, common_prefix_len(slot.tokens, submission.tokens) if slot is not None else 0
        if slot is None or len(slot.tokens) < submission.prefix_len:
            return None
        prefix = slot.tokens[: submission.prefix_len]
        if zlib.crc32(prefix) != submission.prefix_crc:
            return None
        return prefix + submission.tokens, submission.prefix_len
