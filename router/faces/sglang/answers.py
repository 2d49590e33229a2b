"""Answers of SGLang's ``/generate``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.v1 import session_pb2
from router.faces.http import DONE, sse_event
from router.faces.sglang.bodies import GenerateBody
from router.text import TextCodec
from router.turns.turn import TurnChunk, TurnRequest


class Answer:
    """SGLang's response body: cumulative, also in a stream."""

    def __init__(self, body: GenerateBody, request: TurnRequest, codec: TextCodec) -> None:
        self._body, self._request, self._codec = body, request, codec
        self._started = time.monotonic()
        self._text = ""
        self._tokens: list[int] = []
        self._last: TurnChunk | None = None
        self._output: list[session_pb2.TokenLogprob] = []
        self._input: list[session_pb2.TokenLogprob] = []

    def add(self, chunk: TurnChunk, text: str) -> None:
        """Add a chunk's output."""
        self._text += text
        self._tokens += chunk.tokens
        self._output += chunk.logprobs
        self._input += chunk.input_logprobs
        self._last = chunk

    def body(self) -> dict[str, Any]:
        """The response as of the last chunk."""
        chunk = self._last
        assert chunk is not None
        finish: dict[str, Any] | None = None
        if chunk.finish_reason:
            finish = {"type": chunk.finish_reason}
            if chunk.finish_reason == "stop":
                finish["matched"] = chunk.matched
            elif chunk.finish_reason == "length":
                finish["length"] = len(self._tokens)
            else:
                finish["message"] = "Aborted"
        meta: dict[str, Any] = {
            "id": self._request.turn_id,
            "finish_reason": finish,
            "prompt_tokens": chunk.prompt_len,
            "completion_tokens": len(self._tokens),
            "cached_tokens": chunk.cached_len,
            "e2e_latency": time.monotonic() - self._started,
        }
        if chunk.speculation.verify_steps:
            meta |= _speculation(chunk.speculation)
        if self._body.return_logprob:
            self._add_logprobs(meta, "output", self._output, [])
            if self._request.sampling.HasField("logprob_start"):
                # No logits come before the first token that is wanted.
                start = self._request.sampling.logprob_start
                prompt: list[int] = list(self._request.prompt or ())
                self._add_logprobs(meta, "input", self._input, prompt[start : start + 1])
        return {"text": self._text, "output_ids": self._tokens, "meta_info": meta}

    def _add_logprobs(
        self, meta: dict[str, Any], name: str, items: list[session_pb2.TokenLogprob], before: list[int]
    ) -> None:
        """SGLang's lists of ``[logprob, token, text]``. ``before``: a token without logprobs that comes first."""
        meta[f"{name}_token_logprobs"] = [
            *(self._entry(None, token) for token in before),
            *(self._entry(item.logprob, item.token) for item in items),
        ]
        meta[f"{name}_top_logprobs"] = [*(None for _ in before), *(self._entries(item.top) for item in items)]
        if self._body.token_ids_logprob is not None:
            wanted = [*(None for _ in before), *(self._entries(item.wanted) for item in items)]
            meta[f"{name}_token_ids_logprobs"] = wanted

    def _entry(self, logprob: float | None, token: int) -> list[Any]:
        return [logprob, token, self._codec.decode([token]) if self._body.return_text_in_logprobs else None]

    def _entries(self, tops: Iterable[session_pb2.TopLogprob]) -> list[list[Any]]:
        return [self._entry(top.logprob, top.token) for top in tops]


def _speculation(drafts: session_pb2.Speculation) -> dict[str, Any]:
    """SGLang's names. The accept length counts the token that each verification brings beside the accepted ones."""
    return {
        "spec_verify_ct": drafts.verify_steps,
        "spec_draft_token_num": drafts.proposed,
        "spec_accept_token_num": drafts.accepted,
        "spec_accept_rate": drafts.accepted / drafts.proposed,
        "spec_accept_length": 1 + drafts.accepted / drafts.verify_steps,
    }


async def answer_events(
    answer: Answer, first: TurnChunk, stream: AsyncGenerator[TurnChunk, None]
) -> AsyncIterator[bytes]:
    """The stream's events, up to ``[DONE]``."""
    chunk = first
    try:
        while True:
            answer.add(chunk, chunk.text)
            event = sse_event(answer.body())
            if chunk.finish_reason:
                break
            yield event
            chunk = await anext(stream)
    except HoldfastError as error:
        event = _error_event(error)
    finally:
        await stream.aclose()
    yield event + DONE


async def batch_events(
    answers: Sequence[Answer], first: tuple[int, TurnChunk], chunks: AsyncGenerator[tuple[int, TurnChunk], None]
) -> AsyncIterator[bytes]:
    """The events of several prompts, each with its ``index``, up to ``[DONE]``."""
    item: tuple[int, TurnChunk] | None = first
    try:
        while item is not None:
            index, chunk = item
            answers[index].add(chunk, chunk.text)
            yield sse_event(answers[index].body() | {"index": index})
            item = await anext(chunks, None)
    except HoldfastError as error:
        yield _error_event(error)
    finally:
        await chunks.aclose()
    yield DONE


def _error_event(error: HoldfastError) -> bytes:
    return sse_event({"error": {"message": error.message, "code": error.code}})
