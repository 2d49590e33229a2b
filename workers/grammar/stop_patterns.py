"""Regular expressions that end an output as soon as it contains a match, searched in linear time.

llguidance follows each as a lazy lexeme ``.*(pattern)`` over bytes: there is no backtracking that a client's
pattern could make endless, and no look-around either, which it refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import InvalidRequest
from workers.grammar.matcher import Matcher

PARAM = "stop_regex"


def lark_of_pattern(pattern: str) -> str:
    """A grammar of the texts that end with their first match."""
    escaped = pattern.replace("/", "\\/").replace("\n", "\\n")
    return f"start: text\ntext[lazy]: /(?s:.*)({escaped})/\n"


class StopPatterns:
    """The stop patterns of one turn. ``matchers``: of ``lark_of_pattern`` over a vocabulary of bytes."""

    def __init__(self, patterns: Sequence[str], matchers: Sequence[Matcher]) -> None:
        self._patterns = patterns
        self._matchers = matchers

    def deep_copy(self) -> StopPatterns:
        """Others in the same state."""
        return StopPatterns(self._patterns, [matcher.deep_copy() for matcher in self._matchers])

    def push(self, text: str) -> str | None:
        """The first pattern that matches in the output, once ``text`` is added. Raises InvalidRequest."""
        data = text.encode()
        for pattern, matcher in zip(self._patterns, self._matchers, strict=True):
            for byte in data:
                if not matcher.consume_token(byte):
                    raise InvalidRequest(f"{PARAM}: {pattern!r} cannot be followed further", PARAM)
                if matcher.is_stopped():
                    return pattern
        return None
