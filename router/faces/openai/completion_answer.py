"""Plain completions' answers: text, logprobs, and the prompt where it is echoed."""

from __future__ import annotations

from typing import Any

from router.faces.openai.logprobs import prompt_logprobs
from router.text import TextCodec
from router.turns.turn import TurnChunk, TurnRequest


class CompletionAnswer:
    """Plain completions' ``AnswerFormat``.

    ``echo``: answers begin with the prompt. ``num_prompt_logprobs``: vLLM's ``prompt_logprobs``.
    """

    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, codec: TextCodec, *, echo: bool, shows_logprobs: bool, shows_ids: bool, num_prompt_logprobs: int | None
    ) -> None:
        self.codec = codec
        self.echo, self.shows_logprobs, self.shows_ids = echo, shows_logprobs, shows_ids
        self.num_prompt_logprobs = num_prompt_logprobs

    def new_choice(self, request: TurnRequest) -> CompletionChoice:
        """One choice of an answer."""
        return CompletionChoice(self, request)


class CompletionChoice:
    """One choice, while it grows."""

    reasoning_tokens = 0

    def __init__(self, answer: CompletionAnswer, request: TurnRequest) -> None:
        self._answer, self._request = answer, request
        self._decode = answer.codec.decode
        self._offset = 0

    def whole(self, total: TurnChunk, text: str) -> dict[str, Any]:
        scored = self._answer.num_prompt_logprobs is not None
        scores = prompt_logprobs(self._answer.codec, total.input_logprobs) if scored else None
        body = self.delta(total, first=True)
        return body | {"text": self._before(first=True) + text, "prompt_logprobs": scores}

    def delta(self, chunk: TurnChunk, *, first: bool) -> dict[str, Any]:
        body: dict[str, Any] = {"index": 0, "text": self._before(first=first) + chunk.text}
        body |= {"logprobs": self._logprobs(chunk, first=first), "finish_reason": chunk.finish_reason or None}
        if self._answer.shows_ids:
            body |= {"token_ids": chunk.tokens} | ({"prompt_token_ids": list(self._prompt)} if first else {})
        if chunk.finish_reason:
            body["matched_stop"] = body["stop_reason"] = chunk.matched
        return body

    @staticmethod
    def top(total: TurnChunk) -> dict[str, Any]:
        """Nothing is beside the choices."""
        return {}

    @staticmethod
    def opening() -> dict[str, Any]:
        """Nor in a stream."""
        return {}

    @property
    def _prompt(self) -> list[int]:
        return list(self._request.prompt or ())

    def _before(self, *, first: bool) -> str:
        return self._decode(self._prompt, special=False) if first and self._answer.echo else ""

    def _logprobs(self, chunk: TurnChunk, *, first: bool) -> dict[str, Any] | None:
        echoed = chunk.input_logprobs if self._answer.echo else []
        if not self._answer.shows_logprobs or not (echoed or chunk.logprobs):
            return None
        items = [*echoed, *chunk.logprobs]
        tokens = [self._decode([item.token]) for item in items]
        logprobs: list[float | None] = [item.logprob for item in items]
        tops: list[dict[str, float] | None] = [
            {self._decode([t.token]): t.logprob for t in item.top} | {token: item.logprob}
            for token, item in zip(tokens, items, strict=True)
        ]
        if first and self._answer.echo:  # no logits come before the first token
            tokens, logprobs, tops = [self._decode(self._prompt[:1]), *tokens], [None, *logprobs], [None, *tops]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
