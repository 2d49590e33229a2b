"""What the engine needs of a library of grammars."""

from __future__ import annotations

from typing import Protocol


class Matcher(Protocol):
    """Follows one output. The methods are llguidance's."""

    def deep_copy(self) -> Matcher:
        """Another matcher in the same state."""

    def compute_bitmask(self) -> bytes:
        """The tokens that may come next: a bit each, the lowest token first."""

    def consume_token(self, sampled_token: int) -> bool:
        """Take the next token. False: the matcher failed, and stays so."""

    def validate_tokens(self, tokens: list[int]) -> int:
        """How many of these tokens, from the first on, may come next. Takes none."""

    def compute_ff_bytes(self) -> bytes:
        """The text that must come next, whatever is chosen."""

    def compute_ff_tokens(self) -> list[int]:
        """The tokens of that text: no others are allowed. Its end is left out if what follows it may change them."""

    def is_stopped(self) -> bool:
        """Whether no token but the end token can follow, or the matcher failed."""

    def is_error(self) -> bool:
        """Whether the matcher failed."""

    def get_error(self) -> str:
        """Why it failed."""
