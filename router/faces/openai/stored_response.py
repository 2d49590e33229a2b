"""A response as it is stored in the journal."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class StoredResponse(BaseModel):
    """A response as the journal stores it. Once it has ended, ``output`` has its token ids and ``text`` their text."""

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
    sampling: bytes = b""
    status: str = "in_progress"
    output: list[int] = []
    text: str = ""
    finish: str = ""
    usage: dict[str, Any] | None = None
    error: dict[str, str] | None = None

    model_config = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}

    @property
    def message_id(self) -> str:
        return "msg_" + self.id.removeprefix("resp_")

    @property
    def ended(self) -> bool:
        return self.status != "in_progress"


def message_of(item: dict[str, Any]) -> dict[str, str]:
    """An item as a chat template's message."""
    return {"role": item["role"], "content": "".join(part["text"] for part in item["content"])}


def output_item(response: StoredResponse) -> dict[str, Any]:
    """The response's output as an item."""
    return {
        "id": response.message_id,
        "type": "message",
        "role": "assistant",
        "status": "completed" if response.status == "completed" else "incomplete",
        "content": [{"type": "output_text", "text": response.text, "annotations": []}],
    }


def output_items(response: StoredResponse) -> list[dict[str, Any]]:
    """The output items of a response that has ended; none before that."""
    return [output_item(response)] if response.status in ("completed", "incomplete") else []
