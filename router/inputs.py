"""A turn's input as tokens that follow its session's.

Tokenizing a long text takes seconds, and all turns of a router share one event loop, so it runs in a thread.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from holdfast.errors import InvalidRequest, PromptTooLong
from holdfast.tokens import pack_tokens
from router.fleet.fleet import Fleet
from router.text import TextCodec
from router.time_limit import within
from router.turns.sessions import Session
from router.turns.turn import Prepare

T = TypeVar("T")
TEMPLATE_LIMIT_S = 10.0
"""A template that takes longer for a conversation rejects it."""
SHORT = 4096
"""Characters or tokens that are converted in the event loop: a millisecond or two."""


class InputEncoder:
    """Tokenizes inputs, and refuses those that cannot fit into the context."""

    def __init__(self, codec: TextCodec, fleet: Fleet) -> None:
        self._codec = codec
        self._fleet = fleet

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        *,
        continues: bool = False,
        answers: bool = True,
    ) -> str:
        """See ``TextCodec.render_chat``. Other turns go on while a long conversation is rendered."""
        work = partial(self._codec.render_chat, messages, tools, variables, continues=continues, answers=answers)
        texts = [message.get("content") for message in messages]
        if not tools and not variables and sum(len(t) if isinstance(t, str) else SHORT for t in texts) < SHORT:
            return work()  # a thread takes longer
        try:
            return await within(TEMPLATE_LIMIT_S, work)
        except TimeoutError:
            late = f"messages: the model's chat template takes longer than {TEMPLATE_LIMIT_S:g} s for them"
            raise InvalidRequest(late, "messages") from None

    async def encode(self, text: str, *, special: bool) -> array[int]:
        """``text`` as tokens; with ``special``, preceded by the tokens that start an input. Raises PromptTooLong."""
        self._refuse_too_long(text)
        return array("i", await _in_thread_if_long(len(text), self._codec.encode, text, special=special))

    async def prediction(self, text: str) -> bytes:
        """A prediction's tokens, packed. Raises InvalidRequest."""
        try:
            return pack_tokens(await self.encode(text, special=False))
        except PromptTooLong:
            raise InvalidRequest("prediction: is longer than an output can be", "prediction") from None

    def of_text(self, text: str, *, special: bool) -> Prepare:
        """The request has the whole history as text: keep the session's tokens for it, and add the rest."""

        async def prepare(session: Session | None) -> tuple[int, array[int]]:
            if session is None:
                return 0, await self.encode(text, special=special)
            self._refuse_too_long(text)
            # Copied: if the client leaves, the session goes to its next turn while the thread continues.
            codec, known = self._codec, session.tokens[:]
            if session.text is None:
                session.text = await _in_thread_if_long(len(known), codec.decode, known)
            keep_len, added = await _in_thread_if_long(
                len(text), codec.continue_session, known, session.text, text, special=special
            )
            return keep_len, array("i", added)

        return prepare

    def _refuse_too_long(self, text: str) -> None:
        """Refuse, before it is tokenized, a text that is too long even for the longest tokens."""
        context_len = self._fleet.context_len
        longest = context_len * self._codec.longest_token
        if longest and len(text) > longest:
            raise PromptTooLong(
                f"the input of {len(text)} characters is longer than the model's context length of {context_len} tokens"
            )


def of_tokens(ids: array[int]) -> Prepare:
    """The request has the whole history as token ids: keep the common prefix, and add the rest."""

    async def prepare(session: Session | None) -> tuple[int, array[int]]:
        keep_len = 0
        if session is not None:
            known = session.tokens
            shorter = min(len(known), len(ids))
            keep_len = next((i for i in range(shorter) if known[i] != ids[i]), shorter)
        return keep_len, ids[keep_len:]

    return prepare


async def _in_thread_if_long(size: int, work: Callable[..., T], *args: Any, **keywords: Any) -> T:
    if size <= SHORT:
        return work(*args, **keywords)
    return await asyncio.to_thread(work, *args, **keywords)
