"""Several choices in one request (``n``, ``best_of``, several prompts): a turn each, side by side."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from fastapi import Request
from starlette.responses import Response

from holdfast.errors import HoldfastError, InvalidRequest, SessionNotFound, UnsupportedParameter
from holdfast.v1 import session_pb2
from router.core import RouterCore
from router.faces.http import DONE, error_response, event_stream, sse_event, until_disconnect
from router.faces.openai.generation import (
    AnswerFormat,
    Choice,
    GenerationBody,
    check_generation,
    completion_details,
    usage_of,
)
from router.faces.several import MAX_TURNS, collect_all, first_of, side_by_side
from router.turns.turn import Prepare, TurnChunk, TurnRequest

Made: TypeAlias = tuple[TurnRequest, tuple[TurnChunk, str]]
"""A choice's turn, with its merged chunks and its text."""


async def generate_choices(
    core: RouterCore,
    http: Request,
    tenant: str,
    body: GenerationBody,
    answer: AnswerFormat,
    prompts: Sequence[Prepare],
    sampling: session_pb2.Sampling,
    session_id: str,
    *,
    best_of: int | None = None,
) -> Any:
    """``body.n`` choices for each of ``prompts``, numbered prompt by prompt; with a seed, choice i uses seed + i.

    All of them or an error: if one fails, the others end. On a session the first choice becomes the session, the
    others run on forks of it that end with them. ``best_of``: so many are made for each prompt, and the likeliest
    returned. Raises UnsupportedParameter for several prompts with a session.
    """
    check_generation(core, body)
    num_made = best_of or body.n
    if session_id and len(prompts) > 1:
        raise UnsupportedParameter("prompt: a session has one history; send one prompt", "prompt")
    if num_made * len(prompts) > MAX_TURNS:
        raise InvalidRequest(f"n: at most {MAX_TURNS} choices in one request, over all prompts", "n")
    if num_made > body.n and not sampling.HasField("logprobs"):
        sampling.logprobs = 0
    requests = [
        TurnRequest(tenant, prepare, _with_seed(sampling, i), cache_key=body.prompt_cache_key)
        for prepare in prompts
        for i in range(num_made)
    ]
    forks: list[str] = []
    try:
        await _on_session(core, requests, session_id, forks)
        if body.stream:
            return await _stream(core, http, body, answer, requests, forks)
        results = await until_disconnect(http, collect_all(core, requests))
    except HoldfastError:
        core.gateway.in_background(_release(core, tenant, forks))
        raise
    await core.gateway.in_background(_release(core, tenant, forks))
    if isinstance(results, Response):
        return results
    made = list(zip(requests, results, strict=True))
    groups = [made[i : i + num_made] for i in range(0, len(made), num_made)]
    chosen = [item for group in groups for item in _likeliest(group, body.n)]
    choices = [answer.new_choice(request) for request, _ in chosen]
    bodies = [
        choice.whole(total, text) | {"index": i}
        for i, (choice, (_, (total, text))) in enumerate(zip(choices, chosen, strict=True))
    ]
    usage = _usage([total for total, _ in results], [len(total.tokens) for total, _ in results], choices, num_made)
    top = choices[0].top(chosen[0][1][0])
    return _head(core, answer) | {"object": answer.object_name, "choices": bodies, "usage": usage} | top


def _head(core: RouterCore, answer: AnswerFormat) -> dict[str, Any]:
    return {
        "id": f"{answer.id_prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": core.config.served_model_name,
    }


def _likeliest(made: list[Made], n: int) -> list[Made]:
    """The ``n`` choices with the greatest mean logprob of a token, the likeliest first; all in order if there are n."""
    if len(made) == n:
        return made

    def mean(item: Made) -> float:
        logprobs = [token.logprob for token in item[1][0].logprobs]
        return sum(logprobs) / max(1, len(logprobs))

    return sorted(made, key=mean, reverse=True)[:n]


async def _stream(
    core: RouterCore,
    http: Request,
    body: GenerationBody,
    answer: AnswerFormat,
    requests: Sequence[TurnRequest],
    forks: Sequence[str],
) -> Any:
    chunks, tenant = side_by_side(core, requests), requests[0].tenant
    first = await until_disconnect(http, first_of(chunks))
    if isinstance(first, Response):
        core.gateway.in_background(_release(core, tenant, forks))
        return first
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    choices = [answer.new_choice(request) for request in requests]
    events = _events(answer, _head(core, answer), first, chunks, choices, body.n, usage)

    async def released() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield event
        finally:
            core.gateway.in_background(_release(core, tenant, forks))

    return event_stream(released())


async def _on_session(core: RouterCore, requests: Sequence[TurnRequest], session_id: str, forks: list[str]) -> None:
    """Run the first turn on the session and the others on forks of it, if it exists. Adds them to ``forks``."""
    if not session_id:
        return
    requests[0].session_id = session_id
    for request in requests[1:]:
        with suppress(SessionNotFound):
            record = await core.control.fork(session_id, request.tenant, f"fork-{request.turn_id}", None)
            request.session_id = record.session_id
            forks.append(record.session_id)


async def _release(core: RouterCore, tenant: str, forks: Sequence[str]) -> None:
    for fork in forks:
        with suppress(HoldfastError):
            await core.control.release(fork, tenant)


def _with_seed(sampling: session_pb2.Sampling, choice: int) -> session_pb2.Sampling:
    own = session_pb2.Sampling()
    own.CopyFrom(sampling)
    if own.HasField("seed"):
        own.seed = (own.seed + choice + 2**63) % 2**64 - 2**63
    return own


async def _events(
    answer: AnswerFormat,
    head: dict[str, Any],
    first: tuple[int, TurnChunk],
    chunks: AsyncGenerator[tuple[int, TurnChunk], None],
    choices: Sequence[Choice],
    n: int,
    include_usage: bool,
) -> AsyncIterator[bytes]:
    head = head | {"object": answer.chunk_object_name} | ({"usage": None} if include_usage else {})
    seen: dict[int, TurnChunk] = {}
    num_tokens: dict[int, int] = {}
    item = first
    try:
        while True:
            choice, chunk = item
            opening = choices[choice].opening() if choice not in seen else {}
            body = choices[choice].delta(chunk, first=choice not in seen) | {"index": choice}
            seen[choice], num_tokens[choice] = chunk, num_tokens.get(choice, 0) + len(chunk.tokens)
            yield sse_event(head | {"choices": [body]} | opening)
            try:
                item = await anext(chunks)
            except StopAsyncIteration:
                break
        if include_usage:
            last, counts = [seen[i] for i in sorted(seen)], [num_tokens[i] for i in sorted(seen)]
            yield sse_event(head | {"choices": [], "usage": _usage(last, counts, choices, n)})
        yield DONE
    except HoldfastError as error:
        yield b"data: " + bytes(error_response(error).body) + b"\n\n"
    finally:
        await chunks.aclose()


def _usage(turns: Sequence[TurnChunk], num_tokens: Sequence[int], choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Each prompt counts once, whatever its number of choices; its first choice says how much was cached."""
    prompts = [usage_of(chunk, 0) for chunk in turns[::n]]
    total = sum(usage["prompt_tokens"] for usage in prompts)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in prompts)
    return {
        "prompt_tokens": total,
        "completion_tokens": sum(num_tokens),
        "total_tokens": total + sum(num_tokens),
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": completion_details(turns, sum(choice.reasoning_tokens for choice in choices)),
    }
