"""Triton's matrix products in the interpreter: equal to torch's, and a row has the same bits in any batch."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kernels import tiles
from workers.kernels.packed import FP8Weight
from workers.kernels.products import TorchProducts
from workers.kernels.products_launch import TritonProducts
from workers.kernels.tiles import ProductTile, product_tile

TORCH, TRITON = TorchProducts(), TritonProducts()
DTYPES = st.sampled_from([torch.float32, torch.float16])
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SMALL = ProductTile(16, rows=16, depth=32)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of small weights."""
    monkeypatch.setattr(tiles, "product_tile", lambda *shape: SMALL)


def randn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    exact = got.dtype is torch.float32
    torch.testing.assert_close(got, expected, atol=1e-4 if exact else 0.03, rtol=1e-5 if exact else 0.01)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 100),
    dtype=DTYPES,
    biased=st.booleans(),
    part=st.booleans(),
)
def test_equals_torch(rows: int, n: int, k: int, dtype: torch.dtype, biased: bool, part: bool) -> None:
    x, weight = randn(rows, 2 * k, dtype=dtype, seed=1), randn(n, k, dtype=dtype, seed=2)
    x = x[:, k:] if part else x[:, :k].contiguous()  # a part of a wider row, as splits of a product are
    bias = randn(n, dtype=dtype, seed=3) if biased else None
    close(TRITON.linear(x, weight, bias), TORCH.linear(x, weight, bias))


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 20), heads=st.integers(1, 4), n=st.integers(1, 40), k=st.integers(1, 50), dtype=DTYPES)
def test_heads_are_multiplied_with_their_own_weights(rows: int, heads: int, n: int, k: int, dtype: torch.dtype) -> None:
    x = randn(rows, heads, k + 3, dtype=dtype, seed=1)[..., 3:]
    weight = randn(heads, n, k, dtype=dtype, seed=2)
    close(TRITON.by_head(x, weight), TORCH.by_head(x, weight))
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(TRITON.by_head(x, turned), TRITON.by_head(x, weight)), "whatever the strides"


def test_no_rows_are_no_launch() -> None:
    assert TRITON.linear(torch.empty(0, 8), torch.empty(5, 8)).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x, weight = randn(70, 90, dtype=dtype, seed=1), randn(50, 90, dtype=dtype, seed=2)
    whole = TRITON.linear(x, weight)
    for start, end in ((0, 1), (17, 18), (5, 40), (60, 70)):
        assert torch.equal(TRITON.linear(x[start:end], weight), whole[start:end])
    heads = x.view(70, 3, 30)
    by_head = TRITON.by_head(heads, weight[:, :30].expand(3, 50, 30))
    assert torch.equal(TRITON.by_head(heads[9:11], weight[:, :30].expand(3, 50, 30)), by_head[9:11])


def test_tiles_follow_from_the_rows_on_hopper_alone() -> None:
    assert [product_tile(4096, n, True).rows for n in (1, 16, 17, 64, 200, 1000, 8192)] == [
        16,
        16,
        16,
        64,
        64,
        128,
        128,
    ]
    assert len({product_tile(4096, n, False) for n in (1, 16, 17, 64, 200, 1000, 8192)}) == 1
    assert [product_tile(n, 9, False).columns for n in (64, 4096, 6144, 12_288, 28_672, 128_256)] == [
        32,
        32,
        64,
        128,
        128,
        128,
    ]


@settings(max_examples=20)
@given(rows=st.integers(1, 40), n=st.integers(1, 70), k=st.integers(1, 100), dtype=DTYPES, biased=st.booleans())
def test_weights_in_fp8_blocks_give_the_bits_of_dequantized_ones(
    rows: int, n: int, k: int, dtype: torch.dtype, biased: bool
) -> None:
    block = (8, 16)
    scales = 0.5 + torch.rand(1, -(-n // block[0]), -(-k // block[1]), generator=torch.Generator().manual_seed(4))
    weight = FP8Weight(randn(1, n, k, dtype=torch.float32, seed=2).to(torch.float8_e4m3fn), scales, block)
    x, bias = randn(rows, k, dtype=dtype, seed=1), randn(n, dtype=dtype, seed=3) if biased else None
    got, expected = (TRITON.linear(x, w, bias) for w in (weight, weight.dequantized(dtype)[0]))
    if INTERPRETED:
        assert torch.equal(got, expected)
    else:  # tensor cores may add up a converted tile's products in another order
        close(got, expected)
