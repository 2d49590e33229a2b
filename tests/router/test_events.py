"""Server-sent events, as clients cut them into lines."""

from __future__ import annotations

import json

from router.faces.http import sse_event

TEXT = "a\nb\r\u0085c\u2028d\u2029 \x0b\x0c\x1c \u00e9 \U0001f600"


def test_an_event_has_its_lines_and_no_more_whatever_a_client_takes_for_a_line_s_end() -> None:
    data, end = sse_event({"text": TEXT, "score": float("-inf")}).decode("ascii").splitlines()
    assert end == "" and json.loads(data.removeprefix("data: ")) == {"text": TEXT, "score": float("-inf")}
    kind, data, end = sse_event({"type": "ping"}, "ping").decode("ascii").splitlines()
    assert (kind, json.loads(data.removeprefix("data: ")), end) == ("event: ping", {"type": "ping"}, "")
