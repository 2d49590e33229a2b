"""Text of tokens that come one by one."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """``DecodeStream`` that goes on after bytes that are no text.

    Where tokens are bytes (byte fallback, as in Llama 2), a run of them that turns out not to be UTF-8
    changes how those before it read, and the stream raises for good. A model may write such a run at any
    time; so what was held back is then decoded by itself.
    """

    __slots__ = ("_held", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that ``token`` completes; "" while it is part of a character."""
        self._held.append(token)
        try:
            text: str = self._stream.step(self._tokenizer, token) or ""
        except Exception:  # the library has no class for it
            text = self._tokenizer.decode(self._held, skip_special_tokens=True)
            self._stream = DecodeStream(skip_special_tokens=True)
            # The next must not be taken for the beginning of a text, where tokenizers strip a space.
            self._stream.step(self._tokenizer, token)
        if text:
            self._held.clear()
        return text
