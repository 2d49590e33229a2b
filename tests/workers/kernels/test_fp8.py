"""KV in e4m3: the same bits in torch and in Triton's interpreter, and the same attention over them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.workers.kernels.test_paged_attention import CASES
from workers.kernels.attention_launch import plan_triton_attention
from workers.kernels.elementwise import HeadNorms, Places, Rotation, TorchElementwise
from workers.kernels.elementwise_launch import TritonElementwise
from workers.kernels.fp8 import FP8, stored, to_fp8
from workers.kernels.paged_attention import HeadShape, paged_attention_reference, plan_attention
from workers.kernels.triton_fp8 import as_read, as_stored


@triton.jit
def round_trip_kernel(codes, back, x, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < size
    values = tl.load(x + i, mask=there, other=0.0)
    tl.store(codes + i, as_stored(values, codes, 1.0), mask=there)
    tl.store(back + i, as_read(tl.load(codes + i, mask=there, other=0), tl.zeros([BLOCK], tl.float16)), mask=there)


def test_every_code_and_every_tie_is_rounded_as_in_torch() -> None:
    exact = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    exact = exact[~exact.isnan()].sort().values
    ties = (exact[1:] + exact[:-1]) / 2
    beside = [torch.nextafter(ties, torch.full_like(ties, limit)) for limit in (torch.inf, -torch.inf)]
    wild = torch.tensor([1e9, -1e9, 0.0, -0.0, 460.0, 464.0, 465.0, 1e-30, -1e-8])
    generator = torch.Generator().manual_seed(0)
    random = [torch.randn(3000, generator=generator) * spread for spread in (100.0, 1.0, 0.01)]
    x = torch.cat([exact, ties, *beside, wild, *random])
    codes, back = torch.empty(len(x), dtype=torch.uint8), torch.empty(len(x), dtype=torch.float16)
    round_trip_kernel[triton.cdiv(len(x), 256),](codes, back, x, len(x), BLOCK=256)
    expected = to_fp8(x, 1.0)
    assert torch.equal(codes, stored(expected)) and torch.equal(back, expected.to(torch.float16))
    assert back.abs().max() == 448.0, "what is too large is the largest"


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_attention_equals_the_reference(case: str, kernels: str, latent: bool) -> None:
    query_lens, context_lens = CASES[case]
    g = torch.Generator().manual_seed(3)
    heads, kv_heads, dim, page_size = 4, 1 if latent else 2, 16, 4
    k, v = (to_fp8(torch.randn(60, kv_heads, page_size, dim, generator=g), 1.0) for _ in range(2))
    q = torch.randn(sum(query_lens), heads, dim, generator=g)
    num_columns = -(-max(context_lens) // page_size)
    tables = torch.randperm(60, generator=g)[: num_columns * len(query_lens)].view(len(query_lens), -1).int()
    v_dim = 9 if latent else 0
    values = k.float()[..., :9] if latent else v
    expected = paged_attention_reference(q, k, values, tables, query_lens, context_lens, 0.2)
    plan = plan_attention if kernels == "torch" else plan_triton_attention
    planned = plan(
        tables, query_lens, context_lens, page_size,
        heads=HeadShape(heads // kv_heads, v_dim or dim), dtype=torch.float32,
    )  # fmt: skip
    got = planned.attend(q, k, None if latent else v, 0.2, v_dim=v_dim)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("norms", [False, True])
def test_both_write_the_same_bits_under_their_scales(norms: bool) -> None:
    g = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(5, heads, 16, generator=g) for heads in (4, 2, 2))
    angles = torch.randn(5, 1, 8, generator=g)
    rotation = Rotation(torch.cat((angles.cos(),) * 2, -1)[..., :16], torch.cat((angles.sin(),) * 2, -1)[..., :16])
    weights = HeadNorms(torch.rand(16, generator=g), torch.rand(16, generator=g), 1e-6) if norms else None
    written = []
    for ops in (TorchElementwise(), TritonElementwise()):
        pages = [torch.zeros(7, 2, 4, 16).to(FP8) for _ in range(2)]
        places = Places(*pages, torch.tensor([5, 3, 0, 1, 6]), torch.arange(5) % 4, (0.03, 2.5))
        queries = ops.rotate_and_write(q, k, v, weights, rotation, places)
        written.append((queries, *map(stored, pages)))
    torch.testing.assert_close(written[0][0], written[1][0])
    assert torch.equal(written[0][2], written[1][2]), "values are scaled and rounded"
    differing = (written[0][1] != written[1][1]).float().mean()
    assert differing < 0.02, "keys are computed first: a last bit may turn a tie"
    kept = torch.stack([written[1][2].view(FP8)[page, :, i % 4] for i, page in enumerate([5, 3, 0, 1, 6])])
    torch.testing.assert_close(kept.float() * 2.5, v, atol=0.05, rtol=0.07)


@pytest.mark.parametrize("ops", [TorchElementwise(), TritonElementwise()])
def test_latents_are_written_in_fp8(ops: TorchElementwise | TritonElementwise) -> None:
    g = torch.Generator().manual_seed(5)
    latent, k_rope = torch.randn(3, 12, generator=g), torch.randn(3, 4, generator=g)
    rotation = Rotation(torch.ones(3, 1, 4), torch.zeros(3, 1, 4))
    pages = torch.zeros(3, 1, 4, 16).to(FP8)
    places = Places(pages, None, torch.tensor([2, 0, 1]), torch.tensor([1, 2, 3]))
    ops.write_latents(latent, torch.ones(12), 0.0, k_rope, rotation, places)
    normal = latent / latent.square().mean(-1, keepdim=True).sqrt()
    kept = torch.stack([pages[page, 0, offset].float() for page, offset in ((2, 1), (0, 2), (1, 3))])
    torch.testing.assert_close(kept, torch.cat((normal, k_rope), -1), atol=0.002, rtol=0.0626)
