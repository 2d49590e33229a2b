"""Triton's experts in their interpreter, against torch's definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kernels import experts_launch
from workers.kernels.experts_launch import ExpertBlocks, TritonExperts, sorted_blocks
from workers.kernels.grouped_experts import ExpertProducts, TorchExperts


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Several blocks of few rows, and less to compute in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts_launch, "BLOCKS", ExpertBlocks(rows=16, columns=16, depth=16))
        yield


def products(
    experts: int, size: int, hidden: int, *, first: int = 0, total: int = 0, biases: bool = False, clamped: bool = False
) -> ExpertProducts:
    g = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * shape[-1] ** -0.5

    return ExpertProducts(
        randn(experts, 2 * size, hidden),
        randn(experts, 2 * size) if biases else None,
        randn(experts, hidden, size),
        randn(experts, hidden) if biases else None,
        first=first,
        num_experts=total or experts,
        clamped=clamped,
        limit=0.4,
        alpha=1.7,
    )


def chosen_of(tokens: int, top_k: int, total: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(total, generator=g)[:top_k] for _ in range(tokens)])
    return chosen, torch.rand(tokens, top_k, generator=g)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 40),
    total=st.integers(2, 7),
    top_k=st.integers(1, 4),
    size=st.integers(1, 40),
    hidden=st.integers(1, 40),
    part=st.booleans(),
    biases=st.booleans(),
    clamped=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equal_torch_s(
    tokens: int, total: int, top_k: int, size: int, hidden: int, part: bool, biases: bool, clamped: bool, seed: int
) -> None:
    first, count = (total // 2, total - total // 2) if part else (0, total)
    w = products(count, size, hidden, first=first, total=total, biases=biases, clamped=clamped)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))
    chosen, weights = chosen_of(tokens, min(top_k, total), total, seed)
    expected = TorchExperts().run(x, chosen, weights, w)
    torch.testing.assert_close(TritonExperts().run(x, chosen, weights, w), expected, atol=3e-6, rtol=3e-5)


def test_a_token_has_the_same_bits_alone_and_in_a_batch() -> None:
    w, x = products(4, 24, 20), torch.randn(40, 20, generator=torch.Generator().manual_seed(0))
    chosen, weights = chosen_of(40, 2, 4, 1)
    batch = TritonExperts().run(x, chosen, weights, w)
    alone = [TritonExperts().run(x[i : i + 1], chosen[i : i + 1], weights[i : i + 1], w) for i in range(40)]
    assert torch.equal(torch.cat(alone), batch)


@given(
    chosen=st.lists(st.integers(0, 5), min_size=1, max_size=90),
    span=st.sampled_from([(0, 6), (0, 3), (3, 6), (5, 6)]),
)
def test_every_row_of_a_local_expert_is_in_one_block(chosen: list[int], span: tuple[int, int]) -> None:
    first, last = span
    w = products(last - first, 2, 2, first=first, total=6)
    order, blocks, ends = sorted_blocks(torch.tensor(chosen), w)
    rows = []
    for expert, place in blocks.tolist():
        if expert >= 0:
            covered = order[place : min(place + 16, int(ends[expert]))].tolist()
            assert covered and all(chosen[row] == first + expert for row in covered)
            rows += covered
    assert sorted(rows) == [i for i, expert in enumerate(chosen) if first <= expert < last]
