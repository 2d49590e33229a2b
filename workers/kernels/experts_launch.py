"""Launches the Triton kernels of a mixture of experts."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workers.kernels.grouped_experts import ExpertProducts, TorchExperts
from workers.kernels.packed import FP8Weight, MXFP4Planes
from workers.kernels.packed_launch import as_stored, depth_of
from workers.kernels.products import Weight
from workers.kernels.tiles import ExpertTile, expert_tile, is_hopper
from workers.kernels.triton_experts import expert_down_kernel, expert_gate_kernel


class TritonExperts(TorchExperts):
    """``Experts`` on a GPU; the choice of experts is torch's."""

    reads_packed = True

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, w: ExpertProducts) -> Tensor:
        tokens, top_k = chosen.shape
        gate_up, gate_scales, gate_format = as_stored(w.gate_up)
        down, down_scales, down_format = as_stored(w.down)
        hidden_size, size = x.shape[-1], depth_of(w.down)
        x, share = x.contiguous(), weights.contiguous()
        tile = tile_of(w.gate_up, chosen.numel(), w.num_experts, x)
        order, blocks, ends = sorted_blocks(chosen.flatten(), w, tile.rows)
        known = {
            "HIDDEN": hidden_size,
            "SIZE": size,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth,
        }
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}
        active = x.new_empty(tokens * top_k, size)
        expert_gate_kernel[len(blocks), triton.cdiv(size, tile.columns)](
            active, x, gate_up, gate_scales, x if w.gate_up_bias is None else w.gate_up_bias, order, blocks, ends,
            w.limit, w.alpha, TOP_K=top_k, BIAS=w.gate_up_bias is not None, CLAMPED=w.clamped, **gate_format, **known,
            **options,
        )  # fmt: skip
        out = x.new_zeros(tokens * top_k, hidden_size)
        expert_down_kernel[len(blocks), triton.cdiv(hidden_size, tile.columns)](
            out, active, down, down_scales, x if w.down_bias is None else w.down_bias, share, order, blocks, ends,
            BIAS=w.down_bias is not None, **down_format, **known, **options,
        )  # fmt: skip
        return out.view(tokens, top_k, hidden_size).sum(1, dtype=torch.float32).to(x.dtype)


def tile_of(weight: Weight, num_rows: int, num_experts: int, x: Tensor) -> ExpertTile:
    """The tile of a layer's experts."""
    hopper = is_hopper(x.device, x.dtype) and not isinstance(weight, FP8Weight)
    return expert_tile(num_rows, num_experts, isinstance(weight, MXFP4Planes), hopper)


def sorted_blocks(chosen: Tensor, w: ExpertProducts, height: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows sorted by expert, the blocks of this rank's experts, and where each expert's rows end.

    ``chosen``: each row's expert. Blocks are int64 ``[blocks, 2]``, an expert (-1: none) and the first place of up to
    ``height`` rows. Computed on the device: how many there are at most follows from the number of rows.
    """
    num_local, device = len(w.gate_up), chosen.device
    order = chosen.argsort(stable=True)
    counts = torch.zeros(w.num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    ends = counts.cumsum(0).narrow(0, w.first, num_local)
    local = counts.narrow(0, w.first, num_local)
    last_block = ((local + height - 1) // height).cumsum(0)
    number = torch.arange(triton.cdiv(chosen.numel(), height) + num_local, device=device)
    expert = torch.searchsorted(last_block, number, right=True)
    known = expert.clamp(max=num_local - 1)
    first_block = last_block - (local + height - 1) // height
    place = (ends - local).index_select(0, known) + (number - first_block.index_select(0, known)) * height
    return order, torch.stack((torch.where(expert < num_local, expert, -1), place), dim=1), ends.contiguous()
