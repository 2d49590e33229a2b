"""Launches the Triton kernels of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from workers.kernels.grouped_experts import ExpertProducts, TorchExperts
from workers.kernels.packed import MXFP4Weight
from workers.kernels.packed_launch import as_stored, depth_of
from workers.kernels.products import Weight
from workers.kernels.triton_experts import expert_down_kernel, expert_gate_kernel


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """The tile of both products: the same for any batch, so that a row's sum does not depend on it."""

    rows: int = 64
    columns: int = 64
    depth: int = 64
    num_warps: int = 8
    num_stages: int = 2


BLOCKS = ExpertBlocks()


class TritonExperts(TorchExperts):
    """``Experts`` on a GPU; the choice of experts is torch's."""

    reads_packed = True

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, w: ExpertProducts) -> Tensor:
        tokens, top_k = chosen.shape
        gate_up, gate_scales, gate_format = as_stored(w.gate_up)
        down, down_scales, down_format = as_stored(w.down)
        hidden_size, size = x.shape[-1], depth_of(w.down)
        x, share = x.contiguous(), weights.contiguous()
        order, blocks, ends = sorted_blocks(chosen.flatten(), w)
        known = {
            "HIDDEN": hidden_size,
            "SIZE": size,
            "BLOCK_M": BLOCKS.rows,
            "BLOCK_N": BLOCKS.columns,
            "BLOCK_K": BLOCKS.depth,
        }
        active = x.new_empty(tokens * top_k, size)
        expert_gate_kernel[len(blocks), triton.cdiv(size, BLOCKS.columns)](
            active, x, gate_up, gate_scales, x if w.gate_up_bias is None else w.gate_up_bias, order, blocks, ends,
            w.limit, w.alpha, TOP_K=top_k, BIAS=w.gate_up_bias is not None, CLAMPED=w.clamped, **gate_format, **known,
            **options_of(w.gate_up), enable_fp_fusion=False,
        )  # fmt: skip
        out = x.new_zeros(tokens * top_k, hidden_size)
        expert_down_kernel[len(blocks), triton.cdiv(hidden_size, BLOCKS.columns)](
            out, active, down, down_scales, x if w.down_bias is None else w.down_bias, share, order, blocks, ends,
            BIAS=w.down_bias is not None, **down_format, **known, **options_of(w.down),
            enable_fp_fusion=False,
        )  # fmt: skip
        return out.view(tokens, top_k, hidden_size).sum(1, dtype=torch.float32).to(x.dtype)


def options_of(weight: Weight) -> dict[str, int]:
    """With 8 warps the conversion of MXFP4 spills on sm_100."""
    num_warps = 4 if isinstance(weight, MXFP4Weight) else BLOCKS.num_warps
    return {"num_warps": num_warps, "num_stages": BLOCKS.num_stages}


def sorted_blocks(chosen: Tensor, w: ExpertProducts) -> tuple[Tensor, Tensor, Tensor]:
    """The rows sorted by expert, the blocks of this rank's experts, and where each expert's rows end.

    ``chosen``: each row's expert. Blocks are int64 ``[blocks, 2]``, an expert (-1: none) and its first place. Computed
    on the device: how many there are at most follows from the number of rows.
    """
    num_local, device = len(w.gate_up), chosen.device
    order = chosen.argsort(stable=True)
    counts = torch.zeros(w.num_experts, dtype=torch.int64, device=device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    ends = counts.cumsum(0).narrow(0, w.first, num_local)
    local = counts.narrow(0, w.first, num_local)
    last_block = ((local + BLOCKS.rows - 1) // BLOCKS.rows).cumsum(0)
    number = torch.arange(triton.cdiv(chosen.numel(), BLOCKS.rows) + num_local, device=device)
    expert = torch.searchsorted(last_block, number, right=True)
    known = expert.clamp(max=num_local - 1)
    first_block = last_block - (local + BLOCKS.rows - 1) // BLOCKS.rows
    place = (ends - local).index_select(0, known) + (number - first_block.index_select(0, known)) * BLOCKS.rows
    return order, torch.stack((torch.where(expert < num_local, expert, -1), place), dim=1), ends.contiguous()
