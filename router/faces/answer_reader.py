"""Reads one answer's text with its parser, and leaves out the special tokens that mark nothing."""

from __future__ import annotations

from router.formats.deltas import Delta, Parser, PlainText
from router.text import TextCodec


class AnswerReader:
    """``parser``: None where all of the output is text, in which special tokens are shown only if that is wanted."""

    def __init__(self, codec: TextCodec, parser: Parser | None) -> None:
        self._codec, self._is_plain = codec, parser is None
        self._parser = parser or PlainText()

    def read(self, text: str, *, ended: bool) -> Delta:
        """What new text adds to the answer. ``ended``: no more comes."""
        delta = self._parser.push(text)
        if ended:
            delta.add(self._parser.finish())
        if not self._is_plain:
            delta.text = self._codec.without_special(delta.text)
        return delta
