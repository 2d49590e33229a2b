"""From a request to a live turn: its input is tokenized, checked, and given a seed."""

from __future__ import annotations

import random
from array import array

from holdfast.errors import InvalidRequest, PromptTooLong
from holdfast.tokens import out_of_vocabulary
from router.fleet.fleet import Fleet
from router.turns.sessions import Session
from router.turns.turn import LiveTurn, TurnRequest


async def prepare_turn(request: TurnRequest, session: Session | None, fleet: Fleet) -> LiveTurn:
    """The turn, not yet placed. Raises InvalidRequest, PromptTooLong, and what ``request.prepare`` raises."""
    keep_len, ids = await request.prepare(session)
    tokens = (session.tokens[:keep_len] if session else array("i")) + ids
    if not tokens:
        raise InvalidRequest("the input is empty; it must hold at least one token")
    if fleet.context_len and len(tokens) >= fleet.context_len:
        raise PromptTooLong(
            f"the input of {len(tokens)} tokens is longer than the model's context length allows: the maximum allowed "
            f"length is {fleet.context_len - 1} tokens"
        )
    wrong = out_of_vocabulary(ids, fleet.vocab_size) if fleet.vocab_size else None
    if wrong is not None:
        raise InvalidRequest(f"token id {wrong} is out of vocabulary, whose ids are from 0 to {fleet.vocab_size - 1}")
    if request.sampling.HasField("grammar"):
        # The grammar says where the output ends: cut elsewhere, it would be no text of it.
        for field in ("stop", "stop_token_ids", "ignore_eos"):
            request.sampling.ClearField(field)
    if not request.sampling.HasField("seed"):
        # Drawn here, not by the worker, so that a failover continues with the same noise.
        request.sampling.seed = random.getrandbits(62)
    request.prompt = tokens[:]
    return LiveTurn(request, session, keep_len, tokens, len(tokens), epoch=session.record.epoch if session else 0)
