"""Triton's attention in its interpreter: equal to the reference, and the same bits however the work is cut.

The interpreter multiplies bf16 as integers, so fp16 and fp32 stand for it here; ``test_compiled`` compiles it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.kernels.test_paged_attention import CASES, KINDS, NUM_PAGES
from workers.kernels import tiles
from workers.kernels.attention_launch import plan_triton_attention
from workers.kernels.paged_attention import HeadShape, paged_attention_reference
from workers.kernels.tiles import AttentionTiles, Blocks

SMALL = Blocks(16, 16, 32)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short contexts have several, and small tiles, which the interpreter computes sooner."""
    monkeypatch.setattr(tiles, "attention_tiles", lambda v_dim, hopper: AttentionTiles(SMALL, SMALL))


def check(
    query_lens: list[int],
    context_lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    v_dim: int = 0,
    page_size: int = 4,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    **options: Any,
) -> None:
    """``v_dim``: the values are the first part of the keys."""
    g = torch.Generator().manual_seed(seed)
    num_columns = -(-max(context_lens) // page_size)
    num_pages = num_columns * len(query_lens) + 5
    k, v = (torch.randn(num_pages, kv_heads, page_size, dim, generator=g).to(dtype) for _ in range(2))
    q = torch.randn(sum(query_lens), heads, dim, generator=g).to(dtype)
    tables = torch.randperm(num_pages - 1, generator=g)[: num_columns * len(query_lens)].view(len(query_lens), -1)
    tables = tables.to(torch.int32)
    values = k[..., :v_dim] if v_dim else v
    expected = paged_attention_reference(
        q, k, values, tables, query_lens, context_lens, dim**-0.5, window=window, **options
    )
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        # What no query's window reaches may be freed, and hold anything.
        tables[row, : max(0, context_len - query_len - window + 1) // page_size if window else 0] = num_pages - 1
    k[-1], v[-1] = torch.nan, torch.nan
    plan = plan_triton_attention(
        tables,
        query_lens,
        context_lens,
        page_size,
        heads=HeadShape(heads // kv_heads, v_dim or dim),
        dtype=dtype,
        window=window,
    )
    got = plan.attend(q, k, None if v_dim else v, dim**-0.5, v_dim=v_dim, **options)
    close = {"atol": 2e-6, "rtol": 2e-5} if dtype is torch.float32 else {"atol": 2e-3, "rtol": 2e-3}
    torch.testing.assert_close(got, expected, **close)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str, kind: str) -> None:
    check(*CASES[case], **KINDS[kind])


LENGTHS = st.lists(
    st.integers(1, 150).flatmap(lambda n: st.tuples(st.integers(1, min(n, 40)) | st.just(1), st.just(n))),
    min_size=1,
    max_size=3,
)


@settings(max_examples=25, deadline=None)
@given(
    lengths=LENGTHS,
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 7, 20]),
    dim=st.sampled_from([8, 10, 16, 40, 64]),
    v_dim=st.sampled_from([0, 0, 6]),
    page_size=st.sampled_from([1, 2, 16, 64, 256]),
    window=st.sampled_from([0, 0, 1, 5, 33, 70, 200]),
    softcap=st.sampled_from([0.0, 2.0]),
    with_sinks=st.booleans(),
    half=st.booleans(),
)
def test_any_shape_equals_the_reference(
    lengths: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    v_dim: int,
    page_size: int,
    window: int,
    softcap: float,
    with_sinks: bool,
    half: bool,
) -> None:
    kv_heads = 1 if v_dim else kv_heads
    sinks = torch.linspace(-1, 2, kv_heads * group) if with_sinks else None
    check(
        [query_len for query_len, _ in lengths],
        [context_len for _, context_len in lengths],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=dim,
        v_dim=v_dim,
        page_size=page_size,
        window=window,
        softcap=softcap,
        sinks=sinks,
        dtype=torch.float16 if half else torch.float32,
    )


SHAPES: dict[str, dict[str, Any]] = {
    "one head each": {"heads": 2, "kv_heads": 2, "dim": 16},
    "grouped, odd": {"heads": 6, "kv_heads": 2, "dim": 24},
    "grouped, fp16": {"heads": 8, "kv_heads": 1, "dim": 64, "dtype": torch.float16},
    "latent, two tiles": {"heads": 20, "kv_heads": 1, "dim": 24, "v_dim": 16},
}


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_chunks(shape: str, window: int) -> None:
    """Law L14: decoded one by one, computed in one go, or in chunks beside others."""
    given = {"v_dim": 0, "dtype": torch.float32} | SHAPES[shape]
    heads, kv_heads, dim, v_dim, dtype = (given[name] for name in ("heads", "kv_heads", "dim", "v_dim", "dtype"))
    length, page_size, g = 72, 4, torch.Generator().manual_seed(2)
    k, v = (torch.randn(NUM_PAGES, kv_heads, page_size, dim, generator=g).to(dtype) for _ in range(2))
    q = torch.randn(length, heads, dim, generator=g).to(dtype)
    table = torch.randperm(NUM_PAGES, generator=g)[None, : length // page_size].to(torch.int32)

    def attend(*spans: tuple[int, int]) -> torch.Tensor:
        plan = plan_triton_attention(
            table.repeat(len(spans), 1),
            [end - start for start, end in spans],
            [end for _, end in spans],
            page_size,
            heads=HeadShape(heads // kv_heads, v_dim or dim),
            dtype=dtype,
            window=window,
        )
        queries = torch.cat([q[start:end] for start, end in spans])
        return plan.attend(queries, k, None if v_dim else v, dim**-0.5, v_dim=v_dim)

    whole = attend((0, length))
    assert torch.equal(whole, attend((0, 37), (37, 50), (50, length)))
    last = list(range(length - 6, length))
    decodes = [(at, at + 1) for at in last]
    assert torch.equal(whole[last], attend(*decodes))
    assert torch.equal(whole[last], torch.cat([attend(span) for span in decodes]))
    mixed = attend(decodes[3], (50, length), decodes[5])
    assert torch.equal(mixed, torch.cat((whole[last[3] :][:1], whole[50:], whole[last[5] :][:1])))
