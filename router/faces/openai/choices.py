"""Several choices in one request (``n``, several prompts): a turn each, side by side, without a session."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from holdfast.errors import HoldfastError, InvalidRequest, UnsupportedParameter
from holdfast.v1 import session_pb2
from router.core import RouterCore
from router.faces.http import error_response, event_stream, until_disconnect
from router.faces.openai.generation import AnswerFormat, Choice, GenerationBody, check_model, sse_event, usage_of
from router.faces.several import MAX_TURNS, collect_all, first_of, side_by_side
from router.turns.turn import Prepare, TurnChunk, TurnRequest


async def generate_choices(
    core: RouterCore,
    http: Request,
    tenant: str,
    body: GenerationBody,
    answer: AnswerFormat,
    prompts: Sequence[Prepare],
    sampling: session_pb2.Sampling,
    session_id: str,
) -> Any:
    """``body.n`` choices for each of ``prompts``, numbered prompt by prompt; with a seed, choice i uses seed + i.

    All of them or an error: if one fails, the others end. Raises UnsupportedParameter with a session.
    """
    check_model(core, body.model)
    if session_id:
        name = "n" if body.n > 1 else "prompt"
        raise UnsupportedParameter(f"{name}: a session has one turn at a time; ask for one choice", name)
    if body.n * len(prompts) > MAX_TURNS:
        raise InvalidRequest(f"n: at most {MAX_TURNS} choices in one request, over all prompts", "n")
    requests = [
        TurnRequest(tenant, prepare, _with_seed(sampling, i), cache_key=body.prompt_cache_key)
        for prepare in prompts
        for i in range(body.n)
    ]
    head = {
        "id": f"{answer.id_prefix}-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": core.config.served_model_name,
    }
    if body.stream:
        chunks = side_by_side(core, requests)
        first = await until_disconnect(http, first_of(chunks))
        if isinstance(first, Response):
            return first
        usage = body.stream_options is not None and body.stream_options.include_usage
        choices = [answer.new_choice(request.turn_id) for request in requests]
        return event_stream(_events(answer, head, first, chunks, choices, body.n, usage))
    results = await until_disconnect(http, collect_all(core, requests))
    if isinstance(results, Response):
        return results
    choices = [answer.new_choice(request.turn_id) for request in requests]
    bodies = [
        choice.whole(total, text) | {"index": i}
        for i, (choice, (total, text)) in enumerate(zip(choices, results, strict=True))
    ]
    usage_out = _usage([total for total, _ in results], [len(total.tokens) for total, _ in results], choices, body.n)
    return head | {"object": answer.object_name, "choices": bodies, "usage": usage_out}


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
            body = choices[choice].delta(chunk, first=choice not in seen) | {"index": choice}
            seen[choice], num_tokens[choice] = chunk, num_tokens.get(choice, 0) + len(chunk.tokens)
            yield sse_event(head | {"choices": [body]})
            try:
                item = await anext(chunks)
            except StopAsyncIteration:
                break
        if include_usage:
            last, counts = [seen[i] for i in sorted(seen)], [num_tokens[i] for i in sorted(seen)]
            yield sse_event(head | {"choices": [], "usage": _usage(last, counts, choices, n)})
        yield b"data: [DONE]\n\n"
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
    }
