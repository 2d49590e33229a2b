"""Launches the Triton kernels between a layer's products."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from workers.kernels.elementwise import HeadNorms, Places, Rotation, TorchElementwise
from workers.kernels.fp8 import stored
from workers.kernels.products import Weight, as_tensor
from workers.kernels.triton_elementwise import add_norm_kernel, embed_kernel, gated_kernel, latent_kernel, rotate_kernel

GATED_BLOCK = EMBED_BLOCK = 1024


class TritonElementwise(TorchElementwise):
    """``Elementwise`` on a GPU: what has no kernel here runs in torch."""

    def embed(self, tokens: Tensor, table: Weight, part: tuple[int, int] | None, scale: float) -> Tensor:
        rows = as_tensor(table)
        size, (first, end) = rows.shape[1], part or (0, len(rows))
        out = rows.new_empty(len(tokens), size)
        block = min(EMBED_BLOCK, triton.next_power_of_2(size))
        embed_kernel[len(tokens), triton.cdiv(size, block)](
            out, tokens, rows, first, end, scale, SIZE=size, BLOCK=block, SCALED=scale != 1.0, num_warps=warps_of(block)
        )
        return out

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]) if x.stride(-1) == 1 and x.dim() == 2 else x.contiguous().flatten(0, -2)
        out = rows.new_empty(rows.shape)
        self._add_norm(out, out, rows, None, weight, eps)
        return out.view(x.shape)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        if delta is None and weight is None:
            return x, x
        x = x.contiguous()
        total = x if delta is None else x.new_empty(x.shape)
        out = total if weight is None else x.new_empty(x.shape)
        self._add_norm(out, total, x, delta, weight, eps)
        return out, total

    def _add_norm(
        self, out: Tensor, total: Tensor, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float
    ) -> None:
        size = x.shape[-1]
        block = triton.next_power_of_2(size)
        add_norm_kernel[x.shape[0],](
            out, total, x, x if delta is None else delta.contiguous(), x if weight is None else weight,
            eps, x.stride(0),
            SIZE=size, BLOCK=block, ADD=delta is not None, NORM=weight is not None,
            num_warps=warps_of(block), enable_fp_fusion=False,
        )  # fmt: skip

    def rotate(self, x: Tensor, rotation: Rotation, rest: Tensor | None = None) -> Tensor:
        out = x.new_empty(x.shape)
        self._rotate(out, x, x, x, None, rotation, None)
        return out if rest is None else torch.cat((rest, out), dim=-1)

    def rotate_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms | None, rotation: Rotation, places: Places
    ) -> Tensor:
        out = q.new_empty(q.shape)
        self._rotate(out, q, k, v, norms, rotation, places)
        return out

    def _rotate(
        self,
        out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norms: HeadNorms | None,
        rotation: Rotation,
        places: Places | None,
    ) -> None:
        (tokens, heads, dim), rope = q.shape, rotation.cos.shape[-1]
        kv_heads, v_dim = (0, dim) if places is None else (k.shape[1], v.shape[-1])
        k_pages = out if places is None else stored(places.k_pages)
        v_pages = out if places is None or places.v_pages is None else stored(places.v_pages)
        k_scale, v_scale = (1.0, 1.0) if places is None else places.scales
        pages, offsets = (rotation.cos, rotation.cos) if places is None else (places.pages, places.offsets)
        rotate_kernel[tokens, heads + 2 * kv_heads](
            out, q, k, v, k_pages, v_pages, pages, offsets, rotation.cos, rotation.sin,
            q if norms is None else norms.q, k if norms is None else norms.k, 0.0 if norms is None else norms.eps,
            1.0 / k_scale, 1.0 / v_scale,
            q.stride(0), q.stride(1), k.stride(0), v.stride(0), k_pages.stride(0), v_pages.stride(0),
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, V_DIM=v_dim, ROPE=rope, HALF=triton.next_power_of_2(rope // 2),
            REST=triton.next_power_of_2(max(1, dim - rope)), PAGE=0 if places is None else k_pages.shape[2],
            BLOCK=triton.next_power_of_2(v_dim),
            NORM=norms is not None, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def write_latents(
        self, latent: Tensor, weight: Tensor, eps: float, k_rope: Tensor, rotation: Rotation, places: Places
    ) -> None:
        rank, rope = latent.shape[-1], k_rope.shape[-1]
        latent_kernel[latent.shape[0],](
            stored(places.k_pages), latent, k_rope, places.pages, places.offsets, rotation.cos, rotation.sin, weight,
            eps,
            latent.stride(0), k_rope.stride(0), places.k_pages.stride(0),
            RANK=rank, ROPE=rope, BLOCK=triton.next_power_of_2(rank), HALF=triton.next_power_of_2(rope // 2),
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        gate_up = gate_up.contiguous()
        tokens, size = gate_up.shape[0], gate_up.shape[-1] // 2
        out = gate_up.new_empty(tokens, size)
        block = min(GATED_BLOCK, triton.next_power_of_2(size))
        gated_kernel[tokens, triton.cdiv(size, block)](
            out,
            gate_up,
            SIZE=size,
            BLOCK=block,
            GELU=activation == "gelu_pytorch_tanh",
            num_warps=warps_of(block),
            enable_fp_fusion=False,
        )
        return out


def warps_of(block: int) -> int:
    """A thread holds 8 elements or so: its loads are as wide as they can be."""
    return max(1, min(16, block // 256))
