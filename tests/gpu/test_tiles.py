"""On Hopper a row has the same bits in every tile: what ``workers.kernels.tiles`` builds on."""

from __future__ import annotations

import pytest
import torch

from workers.kernels.attention_launch import plan_triton_attention
from workers.kernels.paged_attention import HeadShape
from workers.kernels.products_launch import TritonProducts
from workers.kernels.tiles import HOPPER_PRODUCTS, AttentionTiles, Blocks, ProductTile, attention_tiles
from workers.kernels.tune import OneTile

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a GPU of Hopper's")
MORE_PRODUCTS = (
    ProductTile(128),
    ProductTile(32),
    ProductTile(64, 16, num_warps=1),
    ProductTile(128, 256, num_warps=8),
)


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "depth"), [(6144, 4096), (4096, 14_336), (1000, 2880), (512, 90), (28_672, 1024)])
def test_products(columns: int, depth: int, dtype: torch.dtype) -> None:
    torch.manual_seed(columns)
    x, weight = randn(700, depth, dtype=dtype), randn(columns, depth, scale=depth**-0.5, dtype=dtype)
    results = []
    for tile in (*HOPPER_PRODUCTS, *MORE_PRODUCTS):
        products = TritonProducts(OneTile(tile))
        for rows in (x, x[:16]):
            out = torch.empty(len(rows), columns, device="cuda")
            products.multiply(out.unsqueeze(1), rows.unsqueeze(1), weight.unsqueeze(0), None)
            results.append(out[:16])
    assert all(torch.equal(results[0], result) for result in results), "in fp32"
    torch.testing.assert_close(results[0], x[:16].float() @ weight.float().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (64, 8, 64), (6, 2, 96), (20, 1, 128)])
def test_attention(heads: int, kv_heads: int, dim: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(dim)
    length, page = 1700, 16
    pages = -(-length // page)
    k, v, q = randn(pages, kv_heads, page, dim), randn(pages, kv_heads, page, dim), randn(length, heads, dim)
    table = torch.randperm(pages, device="cuda").int()[None]
    shape = HeadShape(heads // kv_heads, dim)
    given = attention_tiles(dim, True)
    last, results = 64, []
    # What an output in bf16 would hide is seen in fp32.
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size: torch.empty(*size, device=self.device))
    for rows, warps in ((16, 1), (32, 1), (64, 4), (64, 8), (128, 4), (128, 8)):
        blocks = Blocks(rows, given.extend.block_n, given.extend.split, num_warps=warps)
        tiles = OneTile(AttentionTiles(blocks, blocks))
        whole = plan_triton_attention(
            table, [length], [length], page, heads=shape, dtype=q.dtype, window=window, tiles=tiles
        )
        results.append(whole.attend(q, k, v, dim**-0.5)[-last:])
        contexts = list(range(length - last + 1, length + 1))
        each = plan_triton_attention(
            table.repeat(last, 1), [1] * last, contexts, page, heads=shape, dtype=q.dtype, window=window, tiles=tiles
        )
        results.append(each.attend(q[-last:], k, v, dim**-0.5))
    assert results[0].dtype is torch.float32
    assert all(torch.equal(results[0], result) for result in results)
