"""Drafts by lookup: what followed the last tokens where they occurred before.

Agents quote tool output, editors return what they were sent, and both repeat themselves: a draft is copied from the
session's own history, from the request's prediction, or from recent outputs of its tenant (prompt lookup decoding,
https://github.com/apoorvumang/prompt-lookup-decoding).

An index is a table of positions by the hash of the ``n`` tokens before them, as in LZ4: without chains and without
keys, because what is found is compared with the tokens anyway. It costs 16 to 32 bytes a token and O(1) amortised time.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

SIZES = (6, 3)
"""Tokens that are looked up, longest first. Shorter matches are mostly chance."""
NEAR = 16
"""Tokens in which one that is equal is enough."""
MAX_MATCH = 32
"""Tokens of a match that are counted: a longer one is no likelier to continue."""
_FACTORS = (0x2545F4914F7, 0x36DD6C24F1B, 0x1F8A3C5D2E9, 0x3A1B7E6C40D, 0x2C9F15A8B63, 0x17D4E8F39A5)
"""For the tokens before a position, the last first. Odd, of 42 bits: sums for tokens of 18 bits fit into 63."""
_FOLD = 27
_BULK = 32
"""From this many positions on, numpy is faster than a loop."""


Key: TypeAlias = tuple[int, int]
"""Hashes of the last six tokens of a sequence, and of the last three."""


def key_of(tokens: array[int]) -> Key:
    """The key of a sequence of at least three tokens. With less than six, the first hash finds nothing that matches."""
    a, b, c, d, e, f = _FACTORS
    if len(tokens) < SIZES[0]:
        z, y, x = tokens[-3:]
        short = long = x * a + y * b + z * c
    else:
        u, v, w, z, y, x = tokens[-6:]
        short = x * a + y * b + z * c
        long = short + w * d + v * e + u * f
    return long ^ long >> _FOLD, short ^ short >> _FOLD


class NgramIndex:
    """Where n-grams of one sequence of tokens were last seen. The sequence may grow; what it had may change too.

    A position that is found is verified by the caller, with ``match_len``: entries may be stale, or collide.
    """

    def __init__(self) -> None:
        self.num_indexed = SIZES[-1] - 1
        """The n-grams that end at or before this position are indexed."""
        self._resize(256)

    def __len__(self) -> int:
        """Entries, used or not: what its memory is."""
        return len(self._long) + len(self._short)

    def extend(self, tokens: array[int], end: int) -> None:
        """Index the n-grams up to position ``end``, which must be less than the length: something follows them."""
        if 2 * end > len(self._long):
            self._resize(1 << (2 * end).bit_length())
            self.num_indexed = SIZES[-1] - 1
        first = self.num_indexed + 1
        if end - first >= _BULK:
            self._extend_in_bulk(np.frombuffer(tokens, dtype=np.int32), first, end)
        elif end >= first:
            self._extend_one_by_one(tokens, first, end)
        self.num_indexed = max(self.num_indexed, end)

    def cut(self, length: int) -> None:
        """The sequence was cut, and may continue otherwise."""
        self.num_indexed = max(SIZES[-1] - 1, min(self.num_indexed, length - 1))

    def find(self, key: Key) -> tuple[int, int]:
        """The last known positions after the six and the three tokens that a key is of; 0: none."""
        mask = len(self._long) - 1
        return self._long[key[0] & mask], self._short[key[1] & mask]

    def _resize(self, size: int) -> None:
        self._long, self._short = array("i", bytes(4 * size)), array("i", bytes(4 * size))

    def _extend_one_by_one(self, tokens: array[int], first: int, end: int) -> None:
        for position in range(first, min(end + 1, SIZES[0])):
            self._short[key_of(tokens[:position])[1] & len(self._short) - 1] = position
        first = max(first, SIZES[0])
        if first > end:
            return
        # As ``key_of``, but each token is read once: most tokens of an output are indexed here.
        a, b, c, d, e, f = _FACTORS
        long, short, mask = self._long, self._short, len(self._long) - 1
        v, w, z, y, x = tokens[first - SIZES[0] : first - 1]
        for position, token in enumerate(tokens[first - 1 : end], first):
            u, v, w, z, y, x = v, w, z, y, x, token
            value = x * a + y * b + z * c
            short[(value ^ value >> _FOLD) & mask] = position
            value += w * d + v * e + u * f
            long[(value ^ value >> _FOLD) & mask] = position

    def _extend_in_bulk(self, tokens: np.ndarray, first: int, end: int) -> None:
        base, mask = max(0, first - SIZES[0]), len(self._long) - 1
        words = tokens[base:end].astype(np.int64)
        for table, n in ((self._short, SIZES[1]), (self._long, SIZES[0])):
            start = max(first, n)
            positions = np.arange(start, end + 1, dtype=np.int32)
            values = sum(words[start - 1 - i - base : end - i - base] * _FACTORS[i] for i in range(n))
            # Of equal ones the last is assigned: the most recent occurrence.
            np.frombuffer(table, dtype=np.int32)[(values ^ values >> _FOLD) & mask] = positions


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

    def find(self, tokens: array[int], key: Key, *, repeats: bool = False) -> Match | None:
        """The longest recent match of the last of ``tokens``. ``repeats``: they are the source's own end."""
        if self.index.num_indexed < len(self.tokens) - 1:
            self.index.extend(self.tokens, len(self.tokens) - 1)
        for position in self.index.find(key):
            if 0 < position < len(self.tokens):
                length = match_len(self.tokens, position, tokens)
                if length >= SIZES[-1]:
                    return Match(self, position, length, repeats)
        return None

    def find_near(self, token: int, position: int) -> Match | None:
        """Where the source has ``token`` soonest, in the ``NEAR`` tokens from ``position`` on."""
        near = self.tokens[position : position + NEAR]
        return Match(self, position + near.index(token) + 1, 1) if token in near else None


@dataclass(slots=True)
class Match:
    """A place in a source whose last tokens are those of a turn: the turn may continue as the source does."""

    source: Source
    position: int
    length: int
    repeats: bool = False
    """The source is the turn's own sequence: past its end it continues as the repetition that the match is."""

    def follow(self, tokens: array[int]) -> int:
        """The turn's next tokens. Returns how many of them the source continues with."""
        count, rest = len(tokens), self.source.tokens[self.position : self.position + len(tokens)]
        if rest != tokens:
            count = next((i for i, (a, b) in enumerate(zip(rest, tokens, strict=False)) if a != b), len(rest))
        self.position += count
        self.length += count
        return count

    def draft(self, count: int) -> array[int]:
        """The next ``count`` tokens, or fewer at the source's end."""
        block = self.source.tokens[self.position : self.position + count]
        if self.repeats and 0 < len(block) < count:
            block = (block * -(-count // len(block)))[:count]
        return block
