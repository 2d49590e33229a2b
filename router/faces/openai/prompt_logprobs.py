"""vLLM's ``prompt_logprobs``: for each token of the prompt, its logprob and those of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.v1 import session_pb2
from router.text import TextCodec


def prompt_logprobs(codec: TextCodec, items: Sequence[session_pb2.TokenLogprob]) -> list[dict[str, Any] | None]:
    """An entry a token, keyed by token ids. None for the first token, before which there are no logits."""
    return [None, *(_entries(codec, item) for item in items)]


def _entries(codec: TextCodec, item: session_pb2.TokenLogprob) -> dict[str, Any]:
    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": codec.decode([token])}

    tops = {str(top.token): entry(top.token, top.logprob, rank) for rank, top in enumerate(item.top, 1)}
    return {str(item.token): entry(item.token, item.logprob, item.rank)} | tops
