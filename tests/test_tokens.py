"""Token ids: packed, and looked through for those that there are not."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from holdfast.tokens import SHORT, out_of_vocabulary, pack_tokens, unpack_tokens

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8)


@given(TOKENS)
def test_unpacking_undoes_packing(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(array("i", tokens))) == array("i", tokens)


@given(TOKENS, st.integers(0, 2 * SHORT), st.integers(1, 2**31 - 1))
def test_a_token_out_of_the_vocabulary_is_found(tokens: list[int], others: int, size: int) -> None:
    found = out_of_vocabulary(array("i", tokens + [0] * others), size)
    wrong = [token for token in tokens if not 0 <= token < size]
    assert found in wrong if wrong else found is None
