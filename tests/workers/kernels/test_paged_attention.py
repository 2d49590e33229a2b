"""The engine's attention over pages against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workers.kernels.paged_attention import HeadShape, paged_attention, paged_attention_reference, plan_attention

NUM_PAGES, MAX_PAGES = 200, 32
CASES = {
    "one decode": ([1], [9]),
    "decodes of equal length": ([1, 1, 1], [8, 8, 8]),
    "decodes of like length": ([1, 1, 1], [5, 8, 7]),
    "decodes of unlike length": ([1, 1, 1], [1, 30, 2]),
    "whole prefill": ([13], [13]),
    "chunk": ([6], [17]),
    "decodes among chunks": ([1, 5, 1, 3], [12, 5, 1, 20]),
}


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window of 1": {"window": 1},
    "window of 3": {"window": 3},
    "window of 10": {"window": 10},
    "window longer than all": {"window": 100},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all of them": {"window": 7, "softcap": 1.5, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str, kind: str, kv_heads: int, page_size: int) -> None:
    query_lens, context_lens = CASES[case]
    options = dict(KINDS[kind])
    g = torch.Generator().manual_seed(1)
    k, v = (torch.randn(NUM_PAGES, kv_heads, page_size, 8, generator=g) for _ in range(2))
    q = torch.randn(sum(query_lens), 4, 8, generator=g)
    tables = tables_of(len(query_lens), g)
    expected = paged_attention_reference(q, k, v, tables, query_lens, context_lens, 8**-0.5, **options)
    window = options.pop("window", 0)
    for row, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        # What no query's window reaches may be freed, and hold anything.
        first = max(0, context_len - query_len - window + 1) // page_size if window else 0
        tables[row, :first] = NUM_PAGES - 1
    k[-1], v[-1] = torch.nan, torch.nan
    plan = plan_attention(
        tables,
        query_lens,
        context_lens,
        page_size,
        heads=HeadShape(4 // kv_heads, 8),
        dtype=torch.float32,
        window=window,
    )
    got = paged_attention(q, k, v, plan, 8**-0.5, **options)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", CASES)
def test_values_may_be_the_first_part_of_the_keys(case: str, page_size: int) -> None:
    """As in latent attention."""
    query_lens, context_lens = CASES[case]
    g = torch.Generator().manual_seed(1)
    k = torch.randn(NUM_PAGES, 1, page_size, 9, generator=g)
    q = torch.randn(sum(query_lens), 6, 9, generator=g)
    tables = tables_of(len(query_lens), g)
    plan = plan_attention(tables, query_lens, context_lens, page_size, heads=HeadShape(6, 5), dtype=torch.float32)
    got = paged_attention(q, k, None, plan, 0.4, v_dim=5)
    expected = paged_attention_reference(q, k, k[..., :5], tables, query_lens, context_lens, 0.4)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)


def tables_of(num_sequences: int, generator: torch.Generator) -> torch.Tensor:
    order = torch.randperm(NUM_PAGES - 1, generator=generator)[: num_sequences * MAX_PAGES]
    return order.view(num_sequences, MAX_PAGES).to(torch.int32)
