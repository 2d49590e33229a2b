"""Triton's elementwise kernels in their interpreter, against torch's definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kernels.elementwise import HeadNorms, Places, Rotation, TorchElementwise
from workers.kernels.elementwise_launch import TritonElementwise

TORCH, TRITON = TorchElementwise(), TritonElementwise()
ROWS = st.integers(1, 5)
DTYPES = st.sampled_from([torch.float32, torch.float16])


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    exact: dict[str, Any] = {"atol": 2e-6, "rtol": 2e-5} if got.dtype is torch.float32 else {"atol": 4e-3, "rtol": 4e-3}
    torch.testing.assert_close(got, expected, **exact)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    rows=ROWS,
    size=st.integers(1, 300),
    dtype=DTYPES,
    scale=st.sampled_from([1.0, 7.5]),
    part=st.sampled_from([None, (0, 9), (9, 18), (18, 20)]),
)
def test_embed(rows: int, size: int, dtype: torch.dtype, scale: float, part: tuple[int, int] | None) -> None:
    tokens = torch.randint(0, 20, (rows,), generator=torch.Generator().manual_seed(rows))
    table = randn(20 if part is None else 9, size, dtype=dtype)
    assert torch.equal(TRITON.embed(tokens, table, part, scale), TORCH.embed(tokens, table, part, scale))


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, size=st.integers(1, 300), dtype=DTYPES, adds=st.booleans(), norms=st.booleans(), wide=st.booleans())
def test_add_norm(rows: int, size: int, dtype: torch.dtype, adds: bool, norms: bool, wide: bool) -> None:
    x, delta = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype, seed=1) if adds else None
    weight = randn(size, dtype=torch.float32 if wide else dtype, seed=2) if norms else None
    for got, expected in zip(
        TRITON.add_norm(x, delta, weight, 1e-5), TORCH.add_norm(x, delta, weight, 1e-5), strict=True
    ):
        close(got, expected)
    if weight is not None:
        close(TRITON.norm(x, weight, 1e-5), TORCH.norm(x, weight, 1e-5))
        heads = randn(rows, 3, size, dtype=dtype, seed=3)
        close(TRITON.norm(heads, weight, 1e-5), TORCH.norm(heads, weight, 1e-5))


@settings(max_examples=30, deadline=None)
@given(
    tokens=ROWS,
    heads=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    half_dim=st.integers(1, 40),
    part=st.floats(0.1, 1.0),
    page_size=st.sampled_from([1, 4, 16]),
    dtype=DTYPES,
    norms=st.booleans(),
)
def test_queries_are_rotated_and_kv_is_written(
    tokens: int, heads: int, kv_heads: int, half_dim: int, part: float, page_size: int, dtype: torch.dtype, norms: bool
) -> None:
    dim, rope = 2 * half_dim, 2 * max(1, int(part * half_dim))
    both = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)  # one product, as the models have it
    q, k, v = both.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    shaped = (q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, dim))
    rotation = Rotation(randn(tokens, 1, rope, dtype=dtype, seed=1), randn(tokens, 1, rope, dtype=dtype, seed=2))
    given_norms = HeadNorms(randn(dim, dtype=dtype, seed=3), randn(dim, dtype=dtype, seed=4), 1e-6) if norms else None
    places = [
        Places(
            *(torch.full((7, kv_heads, page_size, dim), 9.0, dtype=dtype) for _ in range(2)),
            torch.tensor([5, 3, 0, 1, 6][:tokens]),
            torch.arange(tokens) % page_size,
        )
        for _ in range(2)
    ]
    got = TRITON.rotate_and_write(*shaped, given_norms, rotation, places[0])
    close(got, TORCH.rotate_and_write(*shaped, given_norms, rotation, places[1]))
    for written, expected in ((places[0].k_pages, places[1].k_pages), (places[0].v_pages, places[1].v_pages)):
        assert written is not None and expected is not None
        close(written, expected)
    close(TRITON.rotate(shaped[0], rotation), TORCH.rotate(shaped[0], rotation))


@settings(max_examples=20, deadline=None)
@given(tokens=ROWS, rank=st.integers(1, 60), half_rope=st.integers(1, 20), dtype=DTYPES)
def test_latents_are_normalized_and_written(tokens: int, rank: int, half_rope: int, dtype: torch.dtype) -> None:
    rope = 2 * half_rope
    latent, k_rope = randn(tokens, rank + rope, dtype=dtype).split([rank, rope], dim=-1)
    rotation = Rotation(randn(tokens, 1, rope, dtype=dtype, seed=1), randn(tokens, 1, rope, dtype=dtype, seed=2))
    weight = randn(rank, dtype=dtype, seed=3)
    written = []
    for ops in (TRITON, TORCH):
        places = Places(
            torch.full((7, 1, 4, rank + rope), 9.0, dtype=dtype),
            None,
            torch.tensor([5, 3, 0, 1, 6][:tokens]),
            torch.arange(tokens) % 4,
        )
        ops.write_latents(latent, weight, 1e-6, k_rope, rotation, places)
        written.append(places.k_pages)
    close(*written)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@settings(max_examples=15, deadline=None)
@given(rows=ROWS, size=st.integers(1, 1100), dtype=DTYPES)
def test_gated(activation: str, rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 3 * randn(rows, 2 * size, dtype=dtype)
    close(TRITON.gated(gate_up, activation), TORCH.gated(gate_up, activation))


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    x, delta, weight = randn(6, 200), randn(6, 200, seed=1), randn(200, seed=2)
    batch = TRITON.add_norm(x, delta, weight, 1e-5)
    alone = [TRITON.add_norm(x[i : i + 1], delta[i : i + 1], weight, 1e-5) for i in range(6)]
    assert all(
        torch.equal(torch.cat(parts), whole) for parts, whole in zip(zip(*alone, strict=True), batch, strict=True)
    )
    assert torch.equal(torch.cat([TRITON.gated(x[i : i + 1], "silu") for i in range(6)]), TRITON.gated(x, "silu"))
