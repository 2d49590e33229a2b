"""A turn, from what its client asks for to what the router knows of it while it is under way."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.v1 import session_pb2
from router.sessions import Session
from router.workers import WorkerLink

Prepare: TypeAlias = "Callable[[Session | None], Awaitable[tuple[int, array[int]]]]"
"""Given the session as it is now, which no other turn can change meanwhile: (how many of its tokens to
keep, the turn's input after them)."""


@dataclass(slots=True)
class TurnRequest:
    """One turn, whatever protocol it came by."""

    tenant: str
    prepare: Prepare
    sampling: session_pb2.Sampling
    session_id: str = ""
    """Empty: no session; the request stands alone and leaves nothing but cached prefixes."""
    create_session: bool = True
    queue: bool = True
    """Wait for the session's running turn; off: refuse."""
    cache_key: str = ""
    turn_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    rolled_back: Callable[[], Awaitable[None]] | None = None
    """Called when the turn did not end well and the journal has forgotten it, by this router's doing."""


@dataclass(slots=True)
class TurnChunk:
    """News of a turn. The last one has ``finish_reason``."""

    prompt_len: int
    cached_len: int = 0
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[session_pb2.TokenLogprob] = field(default_factory=list)
    input_logprobs: list[session_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    matched: int | str | None = None


@dataclass(slots=True)
class LiveTurn:
    """A turn under way. ``tokens`` is the whole sequence: kept history, input, output so far."""

    request: TurnRequest
    session: Session | None
    keep_len: int
    tokens: array[int]
    prompt_len: int
    epoch: int = 0
    link: WorkerLink | None = None
    submission: str = ""
    """The turn's name on its worker: another for each time it is sent, for what was sent on a stream that
    broke, and what came of it, may arrive late."""
    cached_len: int | None = None
    overdue: bool = False
    """Its deadline passed while its client did not read."""
    num_lost: int = 0
    """Workers that were lost under it since its last token."""
    resubmitted_at: float | None = None
    """When the turn was sent to another worker, until its next token came."""

    @property
    def key(self) -> str:
        """The name of its slot on the worker."""
        return self.session.session_id if self.session else f"turn-{self.submission}"
