"""Logprobs as OpenAI's chat and responses show them, and vLLM's ``prompt_logprobs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.v1 import session_pb2
from router.text import TextCodec


def logprob_entry(codec: TextCodec, item: session_pb2.TokenLogprob) -> dict[str, Any]:
    """A token of the output, with the likeliest ones in its place."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = codec.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return entry(item.token, item.logprob) | {"top_logprobs": [entry(t.token, t.logprob) for t in item.top]}


def prompt_logprobs(codec: TextCodec, items: Sequence[session_pb2.TokenLogprob]) -> list[dict[str, Any] | None]:
    """An entry a token, keyed by token ids. None for the first token, before which there are no logits."""
    return [None, *(_entries(codec, item) for item in items)]


def _entries(codec: TextCodec, item: session_pb2.TokenLogprob) -> dict[str, Any]:
    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": codec.decode([token])}

    tops = {str(top.token): entry(top.token, top.logprob, rank) for rank, top in enumerate(item.top, 1)}
    return {str(item.token): entry(item.token, item.logprob, item.rank)} | tops
