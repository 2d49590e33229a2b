"""What goes into a leader and comes out of it: turns as routers send them, and the news of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from holdfast.errors import HoldfastError
from workers.sampler import TokenLogprobs
from workers.scheduling import Finish, SamplingParams


@dataclass(frozen=True, slots=True)
class Submission:
    """A turn as a router sends it: the whole input, or what comes after a prefix that is here already."""

    turn_id: str
    session_id: str
    tenant: str
    epoch: int
    tokens: array[int]
    """Everything, or, with ``prefix_len``, what follows the session's first ``prefix_len`` tokens."""
    prompt_len: int
    params: SamplingParams
    ephemeral: bool = False
    prefix_len: int = 0
    prefix_crc: int = 0
    """CRC-32 of those tokens as the router knows them."""


@dataclass(slots=True)
class TurnUpdate:
    """News of one turn from one step. The last one has ``finish``, ``error`` or ``needs_history``."""

    turn_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    input_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_len: int | None = None
    finish: Finish | None = None
    error: HoldfastError | None = None
    needs_history: bool = False
    """The prefix is not here (any more): submit again with all tokens."""
