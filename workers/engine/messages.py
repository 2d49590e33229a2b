"""A leader's input and output: turns as routers submit them, and updates about them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from holdfast.errors import HoldfastError, InvalidRequest
from holdfast.tokens import out_of_vocabulary
from workers.engine.choice import TokenLogprobs
from workers.kv import OWN_SCOPE, KVScope
from workers.scheduling import DraftCounts, Finish, SamplingParams


@dataclass(frozen=True, slots=True)
class Submission:
    """A turn as a router submits it: the whole input, or the part after a prefix that the worker has."""

    turn_id: str
    session_id: str
    tenant: str
    epoch: int
    tokens: array[int]
    """Everything, or, with ``prefix_len``, what follows the session's first ``prefix_len`` tokens."""
    prompt_len: int
    params: SamplingParams
    ephemeral: bool = False
    prediction: array[int] = field(default_factory=lambda: array("i"))
    """Tokens that the output may repeat."""
    prefix_len: int = 0
    prefix_crc: int = 0
    """CRC-32 of those tokens as the router knows them."""
    scope: KVScope = OWN_SCOPE
    kv_nodes: tuple[str, ...] = ()
    """Nodes whose KV stores may have copies of the session's KV."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "scope", self.scope.named_by(self.tenant))


def check_tokens(submission: Submission, tokens: array[int], vocab_size: int) -> None:
    """Raises InvalidRequest if ``tokens``, its whole input, or its parameters name a token that does not exist."""
    new = submission.tokens  # the prefix was checked when it was submitted
    if not tokens or out_of_vocabulary(new, vocab_size) is not None:
        raise InvalidRequest(f"the input must hold at least one token, each from 0 to {vocab_size - 1}")
    predicted = submission.prediction
    if out_of_vocabulary(predicted, vocab_size) is not None:
        raise InvalidRequest(f"prediction: each token must be from 0 to {vocab_size - 1}", "prediction")
    if any(not 0 <= token < vocab_size for token in submission.params.stop_token_ids):
        raise InvalidRequest(f"stop_token_ids: each must be from 0 to {vocab_size - 1}", "stop_token_ids")
    if any(not 0 <= token < vocab_size for token in submission.params.logprob_token_ids):
        message = f"token_ids_logprob: each must be from 0 to {vocab_size - 1}"
        raise InvalidRequest(message, "token_ids_logprob")
    if any(not 0 <= token < vocab_size for token, _ in submission.params.logit_bias):
        raise InvalidRequest(f"logit_bias: each token must be from 0 to {vocab_size - 1}", "logit_bias")


@dataclass(slots=True)
class TurnUpdate:
    """One turn's results of one step. The last update has ``finish``, ``error`` or ``needs_history``."""

    turn_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    input_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_len: int | None = None
    drafts: DraftCounts | None = None
    """Of the turn so far, once it had a draft."""
    finish: Finish | None = None
    error: HoldfastError | None = None
    needs_history: bool = False
    """The worker does not have the prefix: submit the turn again with all tokens."""
