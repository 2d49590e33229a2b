"""The engine's attention over pages against its reference."""

from __future__ import annotations

import pytest
import torch

from workers.kernels.paged_attention import paged_attention, paged_attention_reference, plan_attention

CASES = {
    "one decode": ([1], [9]),
    "decodes of equal length": ([1, 1, 1], [8, 8, 8]),
    "decodes of like length": ([1, 1, 1], [5, 8, 7]),
    "decodes of unlike length": ([1, 1, 1], [1, 30, 2]),
    "whole prefill": ([13], [13]),
    "chunk": ([6], [17]),
    "decodes among chunks": ([1, 5, 1, 3], [12, 5, 1, 20]),
}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str, kv_heads: int, page_size: int) -> None:
    query_lens, context_lens = CASES[case]
    g = torch.Generator().manual_seed(1)
    num_pages, max_pages = 200, 32
    k, v = (torch.randn(num_pages, kv_heads, page_size, 8, generator=g) for _ in range(2))
    q = torch.randn(sum(query_lens), 4, 8, generator=g)
    order = torch.randperm(num_pages, generator=g)[: len(query_lens) * max_pages]
    tables = order.view(len(query_lens), max_pages).to(torch.int32)
    plan = plan_attention(query_lens, context_lens, 4 // kv_heads, torch.float32, torch.device("cpu"))
    got = paged_attention(q, k, v, tables, plan, 8**-0.5)
    expected = paged_attention_reference(q, k, v, tables, query_lens, context_lens, 8**-0.5)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)
