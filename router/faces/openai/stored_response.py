"""A response as it is stored in the journal."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from holdfast.v1 import session_pb2


class StoredResponse(BaseModel):
    """A response as the journal stores it. Once it has ended, ``output`` has its token ids."""

    id: str
    created_at: int
    model: str
    session_id: str
    input: list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | None = None
    first_item: int = 0
    """The number of its first item in its conversation."""
    background: bool = False
    stored: bool = True
    saved: bool = False
    """The journal has it. Requests that are refused are not saved."""
    settings: dict[str, Any] = {}
    """Parameters that are only echoed: temperature, metadata and others."""
    tools: list[dict[str, Any]] = []
    """As the request has them."""
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    template_variables: dict[str, Any] = {}
    sampling: bytes = b""
    status: str = "in_progress"
    output: list[int] = []
    logprobs: list[bytes] = []
    """Of the last tokens of ``output``, if the request wants them: ``TokenLogprob`` messages."""
    truncates: bool = False
    """Leave out the oldest items of an input that is too long."""
    items: list[dict[str, Any]] = []
    """What ``output`` is made of, once the response has ended."""
    finish: str = ""
    matched: int | str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, str] | None = None

    model_config = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}

    @property
    def token_logprobs(self) -> list[session_pb2.TokenLogprob]:
        return [session_pb2.TokenLogprob.FromString(item) for item in self.logprobs]

    @property
    def ended(self) -> bool:
        return self.status != "in_progress"
