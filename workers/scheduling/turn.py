"""A turn as the scheduler sees it: its tokens, its limits, and when it ends."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.kv import OWN_SCOPE, KVScope


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must be a text of."""

    kind: str
    """``json_schema``, ``regex``, ``ebnf`` or ``structural_tag``."""
    text: str
    param: str
    """The request's parameter that it came from, which errors name."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. The defaults are greedy and unlimited."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output (arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    """Over the output, as OpenAI defines it."""
    frequency_penalty: float = 0.0
    """Over the output, as OpenAI defines it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens, before everything else."""
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_logprobs: int = -1
    """-1: none; 0: of the chosen token; n: also of the n likeliest tokens."""
    logprob_start: int = -1
    """First token of the prompt whose logprob is wanted; -1: none."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose logprobs are wanted at each position, beside the chosen one's."""
    grammar: Grammar | None = None
    stop_regexes: tuple[str, ...] = ()
    """Without a grammar: the output ends with the first match of one of them."""
    background: bool = False
    """Yields to other turns: see ``Scheduler``."""

    penalized: bool = field(init=False)
    filtered: bool = field(init=False)
    is_plain: bool = field(init=False)
    """The likeliest token is chosen, of logits as they are."""

    def __post_init__(self) -> None:
        # Each step asks each turn: a property takes six times as long.
        penalized = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        object.__setattr__(self, "penalized", penalized)
        object.__setattr__(self, "filtered", self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)
        object.__setattr__(self, "is_plain", not (penalized or self.logit_bias or self.temperature > 0))


class Finish(NamedTuple):
    """Why a turn ended: ``stop``, ``length``, ``abort``, and what matched for ``stop``."""

    reason: str
    matched: int | str | None = None


@dataclass(slots=True)
class DraftCounts:
    """What became of a turn's drafts."""

    verify_steps: int = 0
    """Steps that computed one."""
    proposed: int = 0
    accepted: int = 0
    prediction_proposed: int = 0
    """Of the request's prediction."""
    prediction_accepted: int = 0

    def add(self, proposed: int, accepted: int, *, is_predicted: bool) -> None:
        """A step computed a draft."""
        self.verify_steps += 1
        self.proposed += proposed
        self.accepted += accepted
        if is_predicted:
            self.prediction_proposed += proposed
            self.prediction_accepted += accepted


@dataclass(slots=True, eq=False)
class Turn:
    """One request. ``tokens`` is the whole sequence so far: history, input, output."""

    turn_id: str
    session_id: str
    tenant: str
    tokens: array[int]
    prompt_len: int
    """The output is ``tokens[prompt_len:]``, also after a failover."""
    keep_len: int
    """Leading tokens that the session's slot had when the turn was submitted."""
    params: SamplingParams
    scope: KVScope = OWN_SCOPE
    ephemeral: bool = False
    end_tokens: frozenset[int] = frozenset()
    """The tokens that end it: the model's, unless it ignores them, and its own."""
    max_len: int = sys.maxsize
    """Of the whole sequence, whatever ``max_tokens`` says."""
    end_len: int = field(init=False)
    """The length at which it ends."""
    arrival: int = 0
    cached_len: int | None = None
    """Tokens whose KV was present at the first admission; None before it."""
    in_flight: bool = False
    """The device has been told to choose the next token, and it is not known here yet."""
    ended: bool = False
    prediction: array[int] = field(default_factory=lambda: array("i"))
    """What the output may repeat, by the request: a source of drafts."""
    drafts: DraftCounts | None = None
    """None: it had none yet."""
    look_at: int = 0
    """The length from which on its drafter wants its tokens."""
    is_given_up: bool = False
    """A draft head does not follow it any more, and cannot begin again: the states that it did not use are gone."""
    num_scored: int = 0
    """Positions of the prompt below this one need not be scored any more."""

    def __post_init__(self) -> None:
        self.scope = self.scope.named_by(self.tenant)
        self.end_len = min(self.max_len, self.prompt_len + self.params.max_tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def first_unscored(self) -> int | None:
        """The first position whose logits are wanted because they score the next input token, if there is one."""
        if self.params.logprob_start < 0:
            return None
        first = max(self.params.logprob_start, self.num_scored)
        return first if first < self.prompt_len - 1 else None

    def banned_tokens(self, num_drafted: int = 0) -> frozenset[int]:
        """Tokens that would end the turn before ``min_tokens``, ``num_drafted`` tokens from now."""
        return self.end_tokens if self.num_output + num_drafted < self.params.min_tokens else frozenset()

    @property
    def is_full(self) -> bool:
        """Whether no token follows those that are known or in flight."""
        return len(self.tokens) + self.in_flight >= self.end_len

    def finish_by_token(self) -> Finish | None:
        """Why the last token, which is new, ends the turn, if it does."""
        if self.tokens[-1] in self.end_tokens:
            return Finish("stop", self.tokens[-1])
        return Finish("length") if len(self.tokens) >= self.end_len else None

    def num_before_end(self, tokens: Sequence[int]) -> int:
        """How many of these come before the first that ends a turn: all of them, if none does."""
        if self.end_tokens.isdisjoint(tokens):
            return len(tokens)
        return next(i for i, token in enumerate(tokens) if token in self.end_tokens)

    def receive(self, tokens: Sequence[int]) -> None:
        """Append the token that was in flight, or those that a draft brought, up to the first that ends the turn."""
        self.in_flight = False
        count = min(1 + self.num_before_end(tokens), self.end_len - len(self.tokens))
        self.tokens.extend(tokens[:count])
