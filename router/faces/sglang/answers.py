"""Answers of SGLang's ``/generate``."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.v1 import session_pb2
from router.faces.sglang.bodies import GenerateBody
from router.turns.turn import TurnChunk


class Answer:
    """SGLang's response body: cumulative, also in a stream."""

    def __init__(self, body: GenerateBody, rid: str) -> None:
        self._body, self._rid = body, rid
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
            "id": self._rid,
            "finish_reason": finish,
            "prompt_tokens": chunk.prompt_len,
            "completion_tokens": len(self._tokens),
            "cached_tokens": chunk.cached_len,
            "e2e_latency": time.monotonic() - self._started,
        }
        if self._body.return_logprob:
            meta["output_token_logprobs"] = [[item.logprob, item.token, None] for item in self._output]
            meta["output_top_logprobs"] = [self._top(item) for item in self._output]
            if self._body.logprob_start_len >= 0:
                # The first requested token has no logprob: no logits were computed before it.
                meta["input_token_logprobs"] = [
                    [None, None, None],
                    *([item.logprob, item.token, None] for item in self._input),
                ]
                meta["input_top_logprobs"] = [None, *(self._top(item) for item in self._input)]
        return {"text": self._text, "output_ids": self._tokens, "meta_info": meta}

    @staticmethod
    def _top(item: session_pb2.TokenLogprob) -> list[list[Any]]:
        return [[top.logprob, top.token, None] for top in item.top]


async def answer_events(
    answer: Answer, first: TurnChunk, stream: AsyncGenerator[TurnChunk, None]
) -> AsyncIterator[bytes]:
    """The stream's events, up to ``[DONE]``."""
    chunk = first
    try:
        while True:
            answer.add(chunk, chunk.text)
            yield b"data: " + json.dumps(answer.body()).encode() + b"\n\n"
            if chunk.finish_reason:
                break
            chunk = await anext(stream)
    except HoldfastError as error:
        yield b"data: " + json.dumps({"error": {"message": error.message, "code": error.code}}).encode() + b"\n\n"
    finally:
        await stream.aclose()
    yield b"data: [DONE]\n\n"


async def batch_events(
    answers: Sequence[Answer], first: tuple[int, TurnChunk], chunks: AsyncGenerator[tuple[int, TurnChunk], None]
) -> AsyncIterator[bytes]:
    """The events of several prompts, each with its ``index``, up to ``[DONE]``."""
    item: tuple[int, TurnChunk] | None = first
    try:
        while item is not None:
            index, chunk = item
            answers[index].add(chunk, chunk.text)
            yield b"data: " + json.dumps(answers[index].body() | {"index": index}).encode() + b"\n\n"
            item = await anext(chunks, None)
    except HoldfastError as error:
        yield b"data: " + json.dumps({"error": {"message": error.message, "code": error.code}}).encode() + b"\n\n"
    finally:
        await chunks.aclose()
    yield b"data: [DONE]\n\n"
