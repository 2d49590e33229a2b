"""What a turn's client sends, as tokens after what its session has.

Tokenizing a long text takes seconds, and the turns of a router share one thread: so it is done in another.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.errors import PromptTooLong
from router.gateway import Gateway
from router.sessions import Session
from router.turns import Prepare

T = TypeVar("T")
SHORT = 4096
"""Characters, or tokens, that are turned into the other at once: a millisecond or two."""


async def encode(gateway: Gateway, text: str, *, special: bool) -> array[int]:
    """``text`` as tokens; ``special``: with what comes before a whole input. Raises PromptTooLong."""
    _refuse_too_long(gateway, text)
    return array("i", await _beside(len(text), gateway.codec.encode, text, special=special))


def prepare_text(gateway: Gateway, text: str, *, special: bool) -> Prepare:
    """The request carries the whole history as text: keep what the session has of it, add the rest."""

    async def prepare(session: Session | None) -> tuple[int, array[int]]:
        if session is None:
            return 0, await encode(gateway, text, special=special)
        _refuse_too_long(gateway, text)
        # A copy: a client that leaves now gives its session to the next turn, and the thread goes on.
        codec, known = gateway.codec, session.tokens[:]
        if session.text is None:
            session.text = await _beside(len(known), codec.decode, known)
        keep_len, added = await _beside(len(text), codec.continue_session, known, session.text, text, special=special)
        return keep_len, array("i", added)

    return prepare


def prepare_tokens(ids: array[int]) -> Prepare:
    """The same for a history of token ids."""

    async def prepare(session: Session | None) -> tuple[int, array[int]]:
        keep_len = 0
        if session is not None:
            known = session.tokens
            shorter = min(len(known), len(ids))
            keep_len = next((i for i in range(shorter) if known[i] != ids[i]), shorter)
        return keep_len, ids[keep_len:]

    return prepare


async def _beside(size: int, work: Callable[..., T], *args: Any, **keywords: Any) -> T:
    if size <= SHORT:
        return work(*args, **keywords)
    return await asyncio.to_thread(work, *args, **keywords)


def _refuse_too_long(gateway: Gateway, text: str) -> None:
    """Before it is tokenized, what no tokens of this model could make fit."""
    longest = gateway.context_len * gateway.codec.longest_token
    if longest and len(text) > longest:
        raise PromptTooLong(
            f"the input of {len(text)} characters cannot fit into {gateway.context_len} tokens, the maximum length"
        )
