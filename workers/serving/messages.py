"""Conversion between the worker's gRPC messages and the engine's types."""

from __future__ import annotations

from typing import Any

from holdfast.errors import InvalidRequest
from holdfast.tokens import unpack_tokens
from holdfast.v1 import session_pb2, worker_pb2
from workers.engine.choice import TokenLogprobs
from workers.engine.messages import Submission, TurnUpdate
from workers.engine.step_log import scope_of
from workers.scheduling import Grammar, SamplingParams

MIN_TEMPERATURE = 1e-5
"""A lower temperature is greedy: fp32 logits divided by it overflow, and no second token has a chance."""


def submission_of(submit: worker_pb2.Submit) -> Submission:
    """Raises InvalidRequest for tokens that are not whole integers."""
    try:
        tokens, prediction = unpack_tokens(submit.tokens), unpack_tokens(submit.sampling.prediction)
    except ValueError:
        raise InvalidRequest("tokens: not a whole number of 32-bit integers") from None
    return Submission(
        turn_id=submit.turn_id,
        session_id=submit.session_id,
        tenant=submit.tenant,
        epoch=submit.epoch,
        tokens=tokens,
        prompt_len=submit.prompt_len,
        params=sampling_params(submit.sampling),
        ephemeral=submit.ephemeral,
        prediction=prediction,
        prefix_len=submit.prefix_len,
        prefix_crc=submit.prefix_crc,
        scope=scope_of(submit.scope),
        kv_nodes=tuple(submit.kv_nodes),
    )


def sampling_params(s: session_pb2.Sampling) -> SamplingParams:
    """The engine's sampling parameters; routers have checked their ranges."""

    def given(name: str, default: Any) -> Any:
        return getattr(s, name) if s.HasField(name) else default

    return SamplingParams(
        temperature=s.temperature if s.temperature >= MIN_TEMPERATURE else 0.0,
        top_k=s.top_k,
        top_p=given("top_p", 1.0),
        min_p=s.min_p,
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=tuple(sorted(s.logit_bias.items())),
        seed=given("seed", 0),
        max_tokens=given("max_tokens", 2**31 - 1),
        min_tokens=s.min_tokens,
        stop=tuple(s.stop),
        stop_token_ids=frozenset(s.stop_token_ids),
        ignore_eos=s.ignore_eos,
        num_logprobs=given("logprobs", -1),
        logprob_start=given("logprob_start", -1),
        logprob_token_ids=tuple(s.logprob_token_ids),
        grammar=_grammar(s.grammar),
        stop_regexes=tuple(s.stop_regex),
        background=s.background,
    )


def _grammar(grammar: session_pb2.Grammar) -> Grammar | None:
    kind = grammar.WhichOneof("kind")
    return Grammar(kind, getattr(grammar, kind), grammar.param or "grammar") if kind else None


def _logprob_message(logprobs: TokenLogprobs) -> session_pb2.TokenLogprob:
    top, wanted = (
        [session_pb2.TopLogprob(token=token, logprob=value) for token, value in pairs]
        for pairs in (logprobs.top, logprobs.wanted)
    )
    return session_pb2.TokenLogprob(
        token=logprobs.token, logprob=logprobs.logprob, top=top, wanted=wanted, rank=logprobs.rank
    )


def update_message(update: TurnUpdate) -> worker_pb2.TurnUpdate:
    """An update as it is sent to the turn's router."""
    message = worker_pb2.TurnUpdate(
        turn_id=update.turn_id,
        tokens=update.tokens,
        logprobs=[_logprob_message(item) for item in update.logprobs],
        input_logprobs=[_logprob_message(item) for item in update.input_logprobs],
        cached_len=update.cached_len,
        needs_history=update.needs_history,
    )
    if update.drafts is not None:
        drafts = update.drafts
        message.speculation.CopyFrom(
            session_pb2.Speculation(
                verify_steps=drafts.verify_steps,
                proposed=drafts.proposed,
                accepted=drafts.accepted,
                prediction_proposed=drafts.prediction_proposed,
                prediction_accepted=drafts.prediction_accepted,
            )
        )
    if update.finish is not None:
        message.finish_reason = update.finish.reason
        if isinstance(update.finish.matched, int):
            message.matched_token = update.finish.matched
        elif update.finish.matched is not None:
            message.matched_text = update.finish.matched
    if update.error is not None:
        message.error_code, message.error_message = update.error.code, update.error.message
        message.error_param = update.error.param or ""
    return message
