"""Whether a text is one of a JSON schema, by the reference implementation."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

FORMATS = jsonschema.FormatChecker(("date", "uuid", "ipv4"))
"""Those that the checker reads as RFC 3339 does: it refuses a lower-case ``z`` in times."""


def check(text: str, schema: dict[str, Any]) -> None:
    """Raises if ``text`` is not JSON of ``schema``."""
    jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)
