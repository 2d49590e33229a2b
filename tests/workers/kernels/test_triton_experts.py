"""Triton's experts in their interpreter, against torch's definition."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.kernels import tiles
from workers.kernels.experts_launch import TritonExperts, sorted_blocks
from workers.kernels.grouped_experts import ExpertProducts, RouterSpec, TorchExperts
from workers.kernels.packed import FP8Weight, MXFP4Planes, MXFP4Weight
from workers.kernels.packed_launch import as_stored
from workers.kernels.products import as_tensor
from workers.kernels.tiles import ExpertTile
from workers.kernels.triton_experts import expert_down_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16]
if not INTERPRETED:
    DTYPES.append(torch.bfloat16)  # which the interpreter does not multiply
BLOCK = (8, 16)
"""Of FP8 weights: DeepSeek's are 128 x 128."""
SMALL = ExpertTile(rows=16, columns=16, depth=32)
"""As deep as a plane of MXFP4: what is added up at a time is the same, packed or not."""


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Several blocks of few rows, and less to compute in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "expert_tile", lambda *shape: SMALL)
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


@st.composite
def routers(draw: st.DrawFn) -> RouterSpec:
    num_groups = draw(st.integers(1, 5))
    members = draw(st.integers(2, 9))
    top_groups = draw(st.integers(1, num_groups))
    return RouterSpec(
        num_groups * members,
        draw(st.integers(1, min(6, top_groups * members))),
        draw(st.sampled_from(["softmax", "sigmoid", "top_softmax"])),
        draw(st.booleans()),
        draw(st.sampled_from([1.0, 2.5])),
        num_groups,
        top_groups,
        draw(st.booleans()),
    )


@settings(max_examples=30)
@given(spec=routers(), tokens=st.integers(1, 9), biased=st.booleans(), seed=st.integers(0, 1000))
def test_chooses_the_experts_that_torch_does(spec: RouterSpec, tokens: int, biased: bool, seed: int) -> None:
    if spec.score == "top_softmax":
        spec = replace(spec, num_groups=1, top_groups=1)
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, spec.num_experts, generator=g)
    bias = torch.randn(spec.num_experts, generator=g) if biased and spec.score != "top_softmax" else None
    chosen, weights = TritonExperts().route(logits, bias, spec, torch.float32)
    expected, theirs = TorchExperts().route(logits, bias, spec, torch.float32)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, theirs)
    alone = [TritonExperts().route(logits[i : i + 1], bias, spec, torch.float32)[1] for i in range(tokens)]
    assert torch.equal(torch.cat(alone), weights)


@given(
    chosen=st.lists(st.integers(0, 5), min_size=1, max_size=90),
    span=st.sampled_from([(0, 6), (0, 3), (3, 6), (5, 6)]),
)
def test_every_row_of_a_local_expert_is_in_one_block(chosen: list[int], span: tuple[int, int]) -> None:
    first, last = span
    w = products(last - first, 2, 2, first=first, total=6)
    order, blocks, ends = sorted_blocks(torch.tensor(chosen), w, 16)
    rows = []
    for expert, place in blocks.tolist():
        if expert >= 0:
            covered = order[place : min(place + 16, int(ends[expert]))].tolist()
            assert covered and all(chosen[row] == first + expert for row in covered)
            rows += covered
    assert sorted(rows) == [i for i, expert in enumerate(chosen) if first <= expert < last]


def packed(weight: torch.Tensor, kind: str, seed: int) -> MXFP4Weight | FP8Weight:
    """Any weight of that shape, as a checkpoint stores it."""
    g, (experts, rows, depth) = torch.Generator().manual_seed(seed), weight.shape
    if kind == "mxfp4":
        groups = -(-depth // 32)
        blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=g, dtype=torch.uint8)
        scales = torch.randint(117, 126, (experts, rows, groups), generator=g, dtype=torch.uint8)
        return MXFP4Weight(blocks, scales, depth)
    shape = experts, -(-rows // BLOCK[0]), -(-depth // BLOCK[1])
    return FP8Weight(weight.to(torch.float8_e4m3fn), 0.5 + torch.rand(shape, generator=g), BLOCK)


@settings(max_examples=25)
@given(
    kind=st.sampled_from(["mxfp4", "fp8"]),
    tokens=st.integers(1, 20),
    size=st.sampled_from([8, 24, 40]),
    hidden=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    clamped=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_packed_weights_give_the_bits_of_dequantized_ones(
    kind: str, tokens: int, size: int, hidden: int, dtype: torch.dtype, clamped: bool, seed: int
) -> None:
    plain = products(3, size, hidden, biases=clamped, clamped=clamped)
    gate_up, down = (packed(as_tensor(weight), kind, seed + n) for n, weight in enumerate((plain.gate_up, plain.down)))
    in_place = replace(plain, gate_up=as_read(gate_up), down=as_read(down))
    dequantized = replace(plain, gate_up=gate_up.dequantized(dtype), down=down.dequantized(dtype))
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)
    chosen, weights = chosen_of(tokens, 2, 3, seed)
    results = [TritonExperts().run(x, chosen, weights.to(dtype), w) for w in (in_place, dequantized)]
    if kind == "mxfp4" or INTERPRETED:
        assert torch.equal(*results)
    else:  # tensor cores may add up a converted tile's products in another order
        torch.testing.assert_close(*results, atol=0.03, rtol=0.01)


def as_read(weight: MXFP4Weight | FP8Weight) -> MXFP4Planes | FP8Weight:
    """As the kernels read it."""
    if isinstance(weight, FP8Weight):
        return weight
    planes = weight.planes(weight.blocks.device)
    assert planes is not None
    return planes


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_and_scale_is_read_as_it_is_meant(dtype: torch.dtype) -> None:
    """One row each: the identity picks the columns of a weight."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 2, 1, 1)
    scales = torch.tensor([0, 1, 2, 9, 60, 80, 100, 107, 113, 117, 120, 123, 125, 126, 127, 128], dtype=torch.uint8)
    weight = MXFP4Weight(blocks, scales.view(1, 1, 16).repeat(1, 2, 1), 512)
    assert torch.equal(read(as_read(weight), dtype), weight.dequantized(dtype)[0].T)
    too_wide = replace(weight, scales=weight.scales + 1)
    assert too_wide.planes(blocks.device) is None
    codes = torch.tensor([c for c in range(256) if c & 127 != 127], dtype=torch.uint8).view(torch.float8_e4m3fn)
    fp8 = FP8Weight(codes.view(1, 1, -1).repeat(1, 2, 1), torch.tensor([[[1.0, 0.375]]]), (8, 128))
    assert torch.equal(read(fp8, dtype), fp8.dequantized(dtype)[0].T)


def read(weight: MXFP4Planes | FP8Weight, dtype: torch.dtype) -> torch.Tensor:
    """A weight of two rows, as the kernel of ``down`` reads it: transposed."""
    depth, height = weight.depth, 64
    out, order = torch.zeros(depth, 2, dtype=dtype), torch.arange(depth)
    blocks = torch.tensor([[0, place] for place in range(0, depth, height)])
    values, scales, form = as_stored(weight)
    expert_down_kernel[len(blocks), 1](
        out, torch.eye(depth, dtype=dtype), values, scales, out, torch.ones(depth), order, blocks,
        torch.tensor([depth]), BIAS=False, HIDDEN=2, SIZE=depth, BLOCK_M=height, BLOCK_N=16, BLOCK_K=64, **form,
    )  # fmt: skip
    return out
