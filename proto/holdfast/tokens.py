"""Token ids on the wire and in the journal: int32, little endian."""

from __future__ import annotations

import sys
from array import array


def pack_tokens(tokens: array[int]) -> bytes:
    """Token ids as int32, little endian."""
    if sys.byteorder == "big":
        tokens = array("i", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """Raises ValueError if ``data`` is not whole int32s."""
    tokens = array("i")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
