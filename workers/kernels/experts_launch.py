"""Launches the Triton kernels of a mixture of experts."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workers.kernels.grouped_experts import ExpertProducts, RouterSpec
from workers.kernels.packed import FP8Weight, MXFP4Planes
from workers.kernels.packed_launch import as_stored, depth_of
from workers.kernels.products import Weight
from workers.kernels.tiles import BY_RULE, ExpertShape, Tiles
from workers.kernels.triton_experts import expert_down_kernel, expert_gate_kernel
from workers.kernels.triton_routing import SIGMOID, SOFTMAX, TOP_SOFTMAX, combine_kernel, route_kernel, sort_kernel

SCORES = {"softmax": SOFTMAX.value, "sigmoid": SIGMOID.value, "top_softmax": TOP_SOFTMAX.value}
COLUMNS = 1024
"""Of a program that sums a token's outputs."""
SORT_BLOCK = 1024
"""Rows that a program looks at together, to find those of its expert."""


class TritonExperts:
    """``Experts`` on a GPU."""

    reads_packed = True

    def __init__(self, tiles: Tiles = BY_RULE) -> None:
        self._tiles = tiles

    def route(
        self, logits: Tensor, choice_bias: Tensor | None, spec: RouterSpec, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        chosen = torch.empty(len(logits), spec.top_k, dtype=torch.int64, device=logits.device)
        weights = torch.empty(len(logits), spec.top_k, dtype=dtype, device=logits.device)
        if len(logits):
            route_kernel[(len(logits),)](
                chosen, weights, logits.contiguous(), logits if choice_bias is None else choice_bias, spec.scale,
                **route_constants(spec, choice_bias is not None), num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
        return chosen, weights

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor, w: ExpertProducts) -> Tensor:
        tokens, top_k = chosen.shape
        gate_up, gate_scales, gate_format = as_stored(w.gate_up)
        down, down_scales, down_format = as_stored(w.down)
        hidden_size, size = x.shape[-1], depth_of(w.down)
        x, share = x.contiguous(), weights.contiguous()
        shape = ExpertShape(w.num_experts, hidden_size, size, x.dtype, _form(w.gate_up))
        tile = self._tiles.experts(shape, chosen.numel(), x.device)
        chosen = chosen.contiguous()
        order, blocks, ends = sorted_blocks(chosen.view(-1), w, tile.rows)
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
        outputs = x.new_empty(tokens * top_k, hidden_size)
        expert_down_kernel[len(blocks), triton.cdiv(hidden_size, tile.columns)](
            outputs, active, down, down_scales, x if w.down_bias is None else w.down_bias, share, order, blocks, ends,
            BIAS=w.down_bias is not None, **down_format, **known, **options,
        )  # fmt: skip
        out = torch.empty_like(x)
        combine_kernel[tokens, triton.cdiv(hidden_size, COLUMNS)](
            out, outputs, chosen, w.first, NUM_LOCAL=len(w.gate_up), TOP_K=top_k, SIZE=hidden_size, BLOCK=COLUMNS
        )
        return out


def route_constants(spec: RouterSpec, bias: bool) -> dict[str, int | bool]:
    """The constants of ``route_kernel``."""
    members = spec.num_experts // spec.num_groups
    return {
        "GROUPS": spec.num_groups,
        "MEMBERS": members,
        "TOP_K": spec.top_k,
        "TOP_GROUPS": spec.top_groups,
        "SCORE": SCORES[spec.score],
        "NORMALIZE": spec.normalize,
        "BY_TWO": spec.group_by_two,
        "BIAS": bias,
        "BLOCK_G": triton.next_power_of_2(spec.num_groups),
        "BLOCK_M": triton.next_power_of_2(members),
        "BLOCK_K": triton.next_power_of_2(spec.top_k),
    }


def _form(weight: Weight) -> str:
    if isinstance(weight, MXFP4Planes):
        return "mxfp4"
    return "fp8" if isinstance(weight, FP8Weight) else "plain"


def sorted_blocks(chosen: Tensor, w: ExpertProducts, height: int) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's rows sorted by expert, the blocks of its experts, and where each expert's rows end.

    ``chosen``: each row's expert. Blocks are int64 ``[blocks, 2]``, an expert (-1: none) and the first place of up to
    ``height`` rows. Computed on the device: how many there are at most follows from the number of rows.
    """
    num_rows, num_local = chosen.numel(), len(w.gate_up)
    num_blocks = triton.cdiv(num_rows, height) + num_local
    order, ends = chosen.new_empty(num_rows), chosen.new_empty(num_local)
    blocks = chosen.new_empty(num_blocks, 2)
    sort_kernel[(num_local,)](
        order, blocks, ends, chosen, num_rows, w.first, num_blocks, HEIGHT=height, BLOCK=SORT_BLOCK, num_warps=4
    )
    return order, blocks, ends
