"""Drafts by lookup: what followed the last tokens where they occurred before.

Agents quote tool output, editors return what they were sent, and both repeat themselves: a draft is copied from the
session's own history, from the request's prediction, or from recent outputs of its tenant (prompt lookup decoding,
https://github.com/apoorvumang/prompt-lookup-decoding).

An index is a table of positions by the hash of the ``n`` tokens before them, as in LZ4: without chains and without
keys, because what is found is compared with the tokens anyway. It costs eight bytes a token and O(1) amortised time.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

SIZES = (6, 3)
"""Tokens that are looked up, longest first. Shorter matches are mostly chance."""
MAX_MATCH = 32
"""Tokens of a match that are counted: a longer one is no likelier to continue."""
_MULTIPLIER, _FINAL, _MASK = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 2**64 - 1
_BULK = 24
"""From this many positions on, numpy is faster than a loop."""


class NgramIndex:
    """Where n-grams of one sequence of tokens were last seen. The sequence may grow; what it had may change too.

    A position that is found is verified by the caller, with ``match_len``: entries may be stale, or collide.
    """

    def __init__(self) -> None:
        self.num_indexed = 0
        """The n-grams that end at or before this position are indexed."""
        self._tables = [array("i", bytes(4 * 256)) for _ in SIZES]
        self._shift = 64 - 8

    def __len__(self) -> int:
        """Entries, used or not: what its memory is."""
        return sum(map(len, self._tables))

    def extend(self, tokens: array[int], end: int) -> None:
        """Index the n-grams up to position ``end``, which must be less than the length: something follows them."""
        start = self.num_indexed
        if end <= start:
            return
        if 2 * end > len(self._tables[0]):
            self._shift = 64 - (4 * end).bit_length()
            self._tables = [array("i", bytes(4 << (64 - self._shift))) for _ in SIZES]
            start = 0
        if end - start < _BULK:
            for table, n in zip(self._tables, SIZES, strict=True):
                for position in range(max(n, start + 1), end + 1):
                    table[self._hash(tokens, position, n)] = position
        else:
            self._extend_in_bulk(np.frombuffer(tokens, dtype=np.int32)[:end], start)
        self.num_indexed = end

    def cut(self, length: int) -> None:
        """The sequence was cut, and may continue otherwise."""
        self.num_indexed = min(self.num_indexed, max(0, length - 1))

    def find(self, tokens: array[int], size: int) -> int:
        """The last known position after the ``SIZES[size]`` tokens that ``tokens`` ends with; 0: none."""
        n = SIZES[size]
        return self._tables[size][self._hash(tokens, len(tokens), n)] if len(tokens) >= n else 0

    def _hash(self, tokens: array[int], end: int, n: int) -> int:
        value = 0
        for token in tokens[end - n : end]:
            value = (value + token + 1) * _MULTIPLIER & _MASK
        return (value * _FINAL & _MASK) >> self._shift

    def _extend_in_bulk(self, tokens: np.ndarray, start: int) -> None:
        words = tokens.astype(np.uint64) + np.uint64(1)
        for table, n in zip(self._tables, SIZES, strict=True):
            first = max(n, start + 1)
            if first > len(words):
                continue
            values = np.zeros(len(words) - first + 1, dtype=np.uint64)
            for i in range(n):
                at = first - n + i
                values = (values + words[at : at + len(values)]) * np.uint64(_MULTIPLIER)
            slots = values * np.uint64(_FINAL) >> np.uint64(self._shift)
            # Of equal ones the last is assigned: the most recent occurrence.
            np.frombuffer(table, dtype=np.int32)[slots] = np.arange(first, len(words) + 1, dtype=np.int32)


def match_len(source: array[int], position: int, tokens: array[int]) -> int:
    """How many tokens before ``position`` of ``source`` equal the last of ``tokens``, up to ``MAX_MATCH``."""
    end, most = len(tokens), min(position, len(tokens), MAX_MATCH)
    if most and source[position - most : position] == tokens[end - most :]:
        return most
    length = 0
    while length < most and source[position - 1 - length] == tokens[end - 1 - length]:
        length += 1
    return length


class Source:
    """A sequence that drafts are copied from."""

    def __init__(self, tokens: array[int], index: NgramIndex | None = None) -> None:
        self.tokens = tokens
        self.index = index or NgramIndex()

    def find(self, tokens: array[int], *, repeats: bool = False) -> Match | None:
        """The longest recent match of the last of ``tokens``. ``repeats``: they are the source's own end."""
        self.index.extend(self.tokens, len(self.tokens) - 1)
        for size, n in enumerate(SIZES):
            position = self.index.find(tokens, size)
            if 0 < position < len(self.tokens):
                length = match_len(self.tokens, position, tokens)
                if length >= n:
                    return Match(self, position, length, repeats)
        return None


@dataclass(slots=True)
class Match:
    """A place in a source whose last tokens are those of a turn: the turn may continue as the source does."""

    source: Source
    position: int
    length: int
    repeats: bool = False
    """The source is the turn's own sequence: past its end it continues as the repetition that the match is."""

    def advance(self, token: int) -> bool:
        """The turn's next token. Returns whether the source continues with it."""
        tokens = self.source.tokens
        if self.position >= len(tokens) or tokens[self.position] != token:
            return False
        self.position += 1
        self.length += 1
        return True

    def draft(self, count: int) -> array[int]:
        """The next ``count`` tokens, or fewer at the source's end."""
        block = self.source.tokens[self.position : self.position + count]
        if self.repeats and 0 < len(block) < count:
            block = (block * -(-count // len(block)))[:count]
        return block
