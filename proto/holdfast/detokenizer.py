"""Incremental detokenization."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """``DecodeStream`` that recovers after bytes that are not UTF-8.

    With byte-fallback tokens (as in Llama 2), a run of bytes that is not UTF-8 changes how the tokens
    before it decode, and the stream raises from then on. A model may produce such a run at any time; the
    tokens held back are then decoded on their own. ``special``: special tokens are text too.
    """

    __slots__ = ("_held", "_skips", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skips = not special
        self._stream = DecodeStream(skip_special_tokens=self._skips)
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that ``token`` completes; "" while it is part of a character."""
        self._held.append(token)
        try:
            text: str = self._stream.step(self._tokenizer, token) or ""
        except Exception:  # the library raises no specific class
            text = self._tokenizer.decode(self._held, skip_special_tokens=self._skips)
            self._stream = DecodeStream(skip_special_tokens=self._skips)
            # The next token does not start a text, where tokenizers strip a space.
            self._stream.step(self._tokenizer, token)
        if text:
            self._held.clear()
        return text
