"""A turn: what its client requests, what its client receives, and the router's state while it is live."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from holdfast.names import scoped
from holdfast.v1 import session_pb2
from router.fleet.link import WorkerLink
from router.tracing import TurnTrace
from router.turns.sessions import Session

Prepare: TypeAlias = "Callable[[Session | None], Awaitable[tuple[int, array[int]]]]"
"""Given the session, which no other turn can change meanwhile: the number of its tokens to keep, and the
turn's input after them."""


@dataclass(slots=True)
class TurnRequest:
    """One turn, whichever API it came by."""

    tenant: str
    prepare: Prepare
    sampling: session_pb2.Sampling
    session_id: str = ""
    """Empty: a request without a session, which leaves nothing but cached prefixes."""
    create_session: bool = True
    queue: bool = True
    """Wait for the session's running turn; otherwise refuse with SessionBusy, unless that one ends just then."""
    cache_key: str = ""
    turn_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    trace: TurnTrace = field(default_factory=TurnTrace)
    prompt: array[int] | None = None
    """The whole input as tokens, once it is known."""
    rolled_back: Callable[[], Awaitable[None]] | None = None
    """Called when this router has rolled the turn back."""


@dataclass(slots=True)
class TurnChunk:
    """New output of a turn. The last chunk has ``finish_reason``."""

    prompt_len: int
    cached_len: int = 0
    index: int = 0
    """Position of ``tokens[0]`` in the turn's output."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    text_before: str = ""
    """Of a resumed turn's first chunk: the output's text before it."""
    logprobs: list[session_pb2.TokenLogprob] = field(default_factory=list)
    input_logprobs: list[session_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    matched: int | str | None = None
    speculation: session_pb2.Speculation = field(default_factory=session_pb2.Speculation)
    """What became of the turn's drafts so far."""


class TurnState(Enum):
    """Where a live turn is in its life."""

    UNPLACED = "unplaced"
    """Its input is known. It has no worker: it is new, or its worker was lost."""
    PLACED = "placed"
    """A worker is chosen, and its session is pinned there."""
    RUNNING = "running"
    """Submitted to its worker."""
    ENDED = "ended"


_TRANSITIONS = {
    TurnState.UNPLACED: {TurnState.PLACED, TurnState.ENDED},
    # Placed again: another router had the session before the turn began.
    TurnState.PLACED: {TurnState.PLACED, TurnState.RUNNING, TurnState.ENDED},
    # Submitted again: the worker lacks the session's history. Unplaced: the worker was lost or drains.
    TurnState.RUNNING: {TurnState.RUNNING, TurnState.UNPLACED, TurnState.ENDED},
    TurnState.ENDED: set[TurnState](),
}


@dataclass(slots=True)
class LiveTurn:
    """A turn from its preparation to its end. Methods change its state and assert that they may."""

    request: TurnRequest
    session: Session | None
    keep_len: int
    tokens: array[int]
    """The whole sequence: kept history, input, output so far."""
    prompt_len: int
    epoch: int = 0
    state: TurnState = TurnState.UNPLACED
    link: WorkerLink | None = None
    submission: str = ""
    """The turn's id on its worker. Unique for each submission: updates of an earlier one may arrive late."""
    cached_len: int | None = None
    history_len: int = 0
    """Tokens that were computed before the present submission, until it is known how many had to be again."""
    moved: bool = False
    """Its session came from another worker with it."""
    num_scored: int = 0
    """Input tokens whose logprobs are there: the next worker need not compute them again."""
    speculation: session_pb2.Speculation = field(default_factory=session_pb2.Speculation)
    """What became of its drafts, on all of its workers."""
    earlier_speculation: session_pb2.Speculation = field(default_factory=session_pb2.Speculation)
    """The same, before the present submission."""
    abort_requested: bool = False
    overdue: bool = False
    """Its deadline passed while its client did not read."""
    num_failovers: int = 0
    """Workers lost since its last token."""
    resubmitted_at: float | None = None
    """When a failover submitted the turn, until its next token arrives."""

    @property
    def log_fields(self) -> dict[str, str]:
        """What a log record says of the turn besides its text."""
        fields = {"turn_id": self.request.turn_id, "session_id": self.request.session_id}
        trace_id = self.request.trace.trace_id
        return fields | {"trace_id": trace_id} if trace_id else fields

    @property
    def sampling(self) -> session_pb2.Sampling:
        """What its next worker has to do."""
        sampling = self.request.sampling
        if self.num_scored:
            left = session_pb2.Sampling()
            left.CopyFrom(sampling)
            left.logprob_start += self.num_scored
            return left
        return sampling

    @property
    def slot_name(self) -> str:
        """The name of its slot on the worker."""
        return self.session.session_id if self.session else scoped(self.request.tenant, f"turn-{self.submission}")

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def worker(self) -> WorkerLink:
        """The worker of a turn that is placed."""
        assert self.link is not None, f"turn {self.request.turn_id} is {self.state.value}"
        return self.link

    def placed(self, link: WorkerLink) -> None:
        """A worker was chosen."""
        self._enter(TurnState.PLACED)
        self.link = link

    def new_submission(self) -> str:
        """The turn is about to be sent to its worker. Returns its id there."""
        self._enter(TurnState.RUNNING)
        self.history_len = len(self.tokens) if self.num_output else self.keep_len
        if self.request.sampling.HasField("logprob_start"):  # what is scored is computed in any case
            self.history_len = min(self.history_len, self.request.sampling.logprob_start)
        self.earlier_speculation = self.speculation
        self.submission = f"{self.request.turn_id}/{uuid.uuid4().hex}"
        return self.submission

    def speculated(self, counts: session_pb2.Speculation) -> None:
        """What became of the present submission's drafts so far."""
        total = session_pb2.Speculation()
        for name in total.DESCRIPTOR.fields_by_name:
            setattr(total, name, getattr(self.earlier_speculation, name) + getattr(counts, name))
        self.speculation = total

    def unplaced(self) -> None:
        """The worker was lost, or preempted the turn."""
        self._enter(TurnState.UNPLACED)
        self.link = None

    def reprepared(self, prepared: LiveTurn) -> None:
        """The session changed before the turn began: take over the input as prepared anew."""
        assert self.state in (TurnState.UNPLACED, TurnState.PLACED), f"the turn is {self.state.value}"
        self.keep_len, self.tokens, self.prompt_len = prepared.keep_len, prepared.tokens, prepared.prompt_len
        self.epoch = prepared.epoch

    def ended(self) -> None:
        """The turn is over, and aborted on its worker if it still runs there."""
        self._enter(TurnState.ENDED)
        if self.link is not None:
            self.link.abort(self.submission)

    def abort(self) -> None:
        """Have the turn end with reason ``abort``."""
        self.abort_requested = True
        if self.link is not None:
            self.link.interrupt(self.submission)

    def _enter(self, state: TurnState) -> None:
        assert state in _TRANSITIONS[self.state], f"a turn that is {self.state.value} cannot become {state.value}"
        self.state = state
