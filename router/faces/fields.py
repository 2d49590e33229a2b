"""Valid values of request fields: pydantic types for the HTTP APIs, functions for gRPC."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, TypeAlias

from fastapi import Header, Request
from pydantic import BaseModel, Field, model_validator

from holdfast.errors import InvalidRequest, UnsupportedParameter
from holdfast.v1 import session_pb2

MAX_NAME = 256
"""Characters of an id chosen by a client. It is stored as long as the session, and is in log lines."""
MAX_STOPS = 16
MAX_STOP_TOKENS = 256
MAX_STOP = 1024
"""Characters of a stop string. The step loop searches for them at every token."""
MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_WANTED_TOKENS = 1024
"""Tokens whose logprobs are wanted at each position."""
MAX_PREDICTION = 1024 * 1024
"""Characters of a prediction. It is journaled with the turn."""
MAX_GRAMMAR = 256 * 1024
"""Characters of a schema or grammar. It is journaled with the turn."""

Int32: TypeAlias = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
CountOrNone: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
Count: TypeAlias = Annotated[int, Field(ge=1, lt=2**31)]
TopK: TypeAlias = Annotated[int, Field(ge=-1, lt=2**31)]
"""-1 and 0: all."""
TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
StopTokens: TypeAlias = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)]
WantedTokens: TypeAlias = Annotated[list[Int32], Field(max_length=MAX_WANTED_TOKENS)]
Stop: TypeAlias = Annotated[str, Field(max_length=MAX_STOP)]
PredictedText: TypeAlias = Annotated[str, Field(max_length=MAX_PREDICTION)]
Stops: TypeAlias = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Name: TypeAlias = Annotated[str, Field(max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f]*$")]
SessionHeader: TypeAlias = Annotated[Name, Header(alias="X-Session-ID")]
Temperature: TypeAlias = Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)]
RepetitionPenalty: TypeAlias = Annotated[float, Field(gt=0.0, le=MAX_REPETITION_PENALTY)]
Penalty: TypeAlias = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
ServiceTier: TypeAlias = Annotated[str, Field(max_length=MAX_NAME)]
BACKGROUND_TIER = "flex"
"""The ``service_tier`` whose requests yield to others. All other tiers are one."""
LogitBias: TypeAlias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]], Field(max_length=MAX_BIASED_TOKENS)
]
"""By token id, in JSON a string."""


class OpenAIBody(BaseModel):
    """A request body of OpenAI's API: null means unset, and unknown fields are ignored."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, body: Any) -> Any:
        return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body


def refuse_unsupported(given: dict[str, bool]) -> None:
    """``given``: for each unsupported parameter, whether the body uses it. Raises UnsupportedParameter."""
    for name, used in given.items():
        if used:
            raise UnsupportedParameter(f"{name} is not supported", name)


async def refuse_invalid_text(request: Request) -> None:
    """Refuse half of a surrogate pair, which JSON can express but neither the journal nor the wire can encode.

    Raises InvalidRequest.
    """
    if request.headers.get("content-type", "").startswith("multipart/"):
        return  # a file's content is not shown as text
    body = await request.body()
    try:
        text = body.decode()
        if "\\u" in text or "\0" in text:  # JSON in UTF-16 contains zero bytes
            json.dumps(await request.json(), ensure_ascii=False).encode()
    except ValueError:
        raise InvalidRequest("the body must be JSON in UTF-8, without halves of surrogate pairs") from None


def check_name(field: str, name: str) -> None:
    """Check an id chosen by a client. Raises InvalidRequest."""
    if len(name) > MAX_NAME or any(ord(char) < 32 or ord(char) == 127 for char in name):
        raise InvalidRequest(f"{field}: must have at most {MAX_NAME} characters, no control characters", field)


def grammar_len(grammar: session_pb2.Grammar) -> int:
    """Characters of a grammar."""
    kind = grammar.WhichOneof("kind")
    return len(getattr(grammar, kind)) if kind else 0


def check_sampling(s: session_pb2.Sampling) -> None:
    """Raises InvalidRequest, which names the field."""
    ranges = {
        "temperature": 0 <= s.temperature <= MAX_TEMPERATURE,
        "top_k": s.top_k >= 0,
        "top_p": not s.HasField("top_p") or 0 < s.top_p <= 1,
        "min_p": 0 <= s.min_p <= 1,
        "repetition_penalty": not s.HasField("repetition_penalty")
        or 0 < s.repetition_penalty <= MAX_REPETITION_PENALTY,
        "presence_penalty": math.fabs(s.presence_penalty) <= MAX_PENALTY,
        "frequency_penalty": math.fabs(s.frequency_penalty) <= MAX_PENALTY,
        "max_tokens": not s.HasField("max_tokens") or s.max_tokens >= 0,
        "min_tokens": s.min_tokens >= 0,
        "stop": len(s.stop) <= MAX_STOPS and all(0 < len(stop) <= MAX_STOP for stop in s.stop),
        "stop_regex": len(s.stop_regex) <= MAX_STOPS and all(0 < len(regex) <= MAX_STOP for regex in s.stop_regex),
        "stop_token_ids": len(s.stop_token_ids) <= MAX_STOP_TOKENS and min(s.stop_token_ids, default=0) >= 0,
        "logprob_token_ids": len(s.logprob_token_ids) <= MAX_WANTED_TOKENS and min(s.logprob_token_ids, default=0) >= 0,
        "logit_bias": len(s.logit_bias) <= MAX_BIASED_TOKENS
        and all(token >= 0 and math.fabs(bias) <= MAX_LOGIT_BIAS for token, bias in s.logit_bias.items()),
        "logprobs": not s.HasField("logprobs") or 0 <= s.logprobs <= MAX_TOP_LOGPROBS,
        "prediction": len(s.prediction) <= 4 * MAX_PREDICTION and len(s.prediction) % 4 == 0,
        "grammar": not s.HasField("grammar") or grammar_len(s.grammar) <= MAX_GRAMMAR,
    }
    for name, valid in ranges.items():
        if not valid:
            raise InvalidRequest(f"sampling.{name}: {str(getattr(s, name))[:100]} is out of range", f"sampling.{name}")
