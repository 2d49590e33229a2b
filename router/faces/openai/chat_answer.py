"""Chat's answers: text, reasoning, calls and logprobs, whole or in a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from router.faces.answer_reader import AnswerReader
from router.faces.openai.logprobs import logprob_entry, prompt_logprobs
from router.formats.deltas import CallDelta, Delta, Parser
from router.text import TextCodec
from router.turns.turn import TurnChunk, TurnRequest


class ChatAnswer:
    """Chat's ``AnswerFormat``. ``new_parser`` makes the parser of one choice; None: all of it is text.

    ``shows_ids``, ``scores_prompt``: it has token ids, and the prompt's logprobs, as vLLM's answers.
    """

    id_prefix, object_name, chunk_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        codec: TextCodec,
        new_parser: Callable[[], Parser] | None,
        *,
        legacy: bool = False,
        short_ids: bool = False,
        shows_logprobs: bool = False,
        shows_ids: bool = False,
        scores_prompt: bool = False,
    ) -> None:
        self.codec, self.new_parser = codec, new_parser
        self.legacy, self.short_ids = legacy, short_ids
        self.shows_logprobs, self.shows_ids, self.scores_prompt = shows_logprobs, shows_ids, scores_prompt

    def new_choice(self, request: TurnRequest) -> ChatChoice:
        """One choice of an answer."""
        return ChatChoice(self, request)


class ChatChoice:
    """One choice, while it grows."""

    def __init__(self, answer: ChatAnswer, request: TurnRequest) -> None:
        self._answer, self._request = answer, request
        self._codec = answer.codec
        self._reader = AnswerReader(answer.codec, answer.new_parser() if answer.new_parser is not None else None)
        self._has_calls = False
        self._reasoning = ""

    @property
    def reasoning_tokens(self) -> int:
        """Of the output so far."""
        return len(self._codec.encode(self._reasoning, special=False)) if self._reasoning else 0

    def whole(self, total: TurnChunk, text: str) -> dict[str, Any]:
        delta = self._parse(text, ended=True)
        message: dict[str, Any] = {"role": "assistant", "content": delta.text or None, "refusal": None}
        if not delta.calls:
            message["content"] = delta.text
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message |= self._calls(delta.calls, whole=True)
        choice = {"index": 0, "message": message, "logprobs": self._logprobs(total)}
        return choice | self._finish(total) | self._ids(total)

    def top(self, total: TurnChunk) -> dict[str, Any]:
        scores = prompt_logprobs(self._codec, total.input_logprobs) if self._answer.scores_prompt else None
        return {"prompt_logprobs": scores} | self.opening()

    def opening(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._request.prompt or ())} if self._answer.shows_ids else {}

    def delta(self, chunk: TurnChunk, *, first: bool) -> dict[str, Any]:
        if chunk.text_before:
            self._parse(chunk.text_before, ended=False)  # shown by the router that began the turn
        new = self._parse(chunk.text, ended=bool(chunk.finish_reason))
        body: dict[str, Any] = {"role": "assistant"} if first else {}
        if new.reasoning:
            body["reasoning_content"] = new.reasoning
        if new.calls:
            body |= self._calls(new.calls, whole=False)
        if new.text or not (new.reasoning or new.calls):
            body["content"] = new.text
        return {"index": 0, "delta": body, "logprobs": self._logprobs(chunk)} | self._finish(chunk) | self._ids(chunk)

    def _parse(self, text: str, *, ended: bool) -> Delta:
        delta = self._reader.read(text, ended=ended)
        self._reasoning += delta.reasoning
        self._has_calls |= bool(delta.calls)
        return delta

    def _calls(self, calls: list[CallDelta], *, whole: bool) -> dict[str, Any]:
        if self._answer.legacy:
            call = calls[0]
            name = {"name": call.name} if call.name else {}
            return {"function_call": name | {"arguments": call.arguments}}
        return {"tool_calls": [self._call(call, whole=whole) for call in calls]}

    def _call(self, call: CallDelta, *, whole: bool) -> dict[str, Any]:
        name = {"name": call.name} if call.name else {}
        body: dict[str, Any] = {} if whole else {"index": call.index}
        if call.name:
            body |= {"id": call_id(self._request.turn_id, call.index, short=self._answer.short_ids), "type": "function"}
        return body | {"function": name | {"arguments": call.arguments}}

    def _finish(self, chunk: TurnChunk) -> dict[str, Any]:
        reason = chunk.finish_reason or None
        if reason == "stop" and self._has_calls:
            reason = "function_call" if self._answer.legacy else "tool_calls"
        return {"finish_reason": reason, "matched_stop": chunk.matched} if reason else {"finish_reason": None}

    def _ids(self, chunk: TurnChunk) -> dict[str, Any]:
        return {"token_ids": chunk.tokens} if self._answer.shows_ids else {}

    def _logprobs(self, chunk: TurnChunk) -> dict[str, Any] | None:
        if not (self._answer.shows_logprobs and chunk.logprobs):
            return None
        return {"content": [logprob_entry(self._codec, item) for item in chunk.logprobs], "refusal": None}


def call_id(turn_id: str, index: int, *, short: bool) -> str:
    """The id of a turn's call: the same when another router resumes the stream."""
    digest = hashlib.blake2b(f"{turn_id}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:9] if short else f"call_{digest}"
