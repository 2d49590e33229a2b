"""The lines of a batch's input file: a request each, in JSON, as OpenAI's batch API describes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MAX_LINES = 50_000
MAX_ERRORS = 100
"""Errors that are reported of one file."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@dataclass(frozen=True, slots=True)
class Line:
    """One request. ``text``: the whole line, parsed again when it runs: a file may hold 50,000."""

    custom_id: str
    text: bytes

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.text)["body"]
        return body


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with a line. ``line``: from 1 on."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


def parse_lines(content: bytes, endpoint: str) -> tuple[list[Line], list[LineError]]:
    """The requests of a file, and what is wrong with it. A file with errors is not run at all."""
    lines: list[Line] = []
    errors: list[LineError] = []
    known: set[str] = set()
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        found = _parse(text, endpoint, known)
        if isinstance(found, Line):
            known.add(found.custom_id)
            lines.append(found)
        else:
            errors.append(LineError(found.code, found.message, number, found.param))
        if len(errors) >= MAX_ERRORS:
            break
    if not lines and not errors:
        errors.append(LineError("empty_file", "the input file has no line with a request"))
    if len(lines) > MAX_LINES:
        errors.append(LineError("too_many_requests", f"the input file has more than {MAX_LINES} requests"))
    return lines, errors


def _parse(text: bytes, endpoint: str, known: set[str]) -> Line | LineError:
    try:
        request = json.loads(text)
    except ValueError:
        return LineError("invalid_json_line", "this line is not parseable as valid JSON")
    if not isinstance(request, dict):
        return LineError("invalid_json_line", "this line is not a JSON object")
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if not isinstance(request.get(name), kind):
            return LineError("invalid_request", f"{name}: must be given, as {kind.__name__}", param=name)
    if request["custom_id"] in known:
        return LineError("duplicate_custom_id", "custom_id: another line has the same", param="custom_id")
    if request["method"] != "POST":
        return LineError("invalid_method", "method: must be POST", param="method")
    if request["url"] != endpoint:
        return LineError("mismatched_endpoint", f"url: must be the batch's endpoint, {endpoint}", param="url")
    for name in ("stream", "background", "conversation"):
        if request["body"].get(name):
            return LineError("unsupported_parameter", f"{name}: has no place in a batch", param=f"body.{name}")
    return Line(request["custom_id"], text)
