"""What a layer does between its products: norms, rotary embeddings, writes of KV, activations.

``Elementwise`` is what the models call. ``TorchElementwise`` defines it and runs on CPU; on GPUs
``TritonElementwise`` does each in one kernel, which reads and writes every element once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu
from torch.nn.functional import rms_norm as torch_rms_norm

from workers.kernels.fp8 import FP8, stored, to_fp8


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tokens of a step write their KV in one layer."""

    k_pages: Tensor
    """``[pages, kv_heads, page_size, head_dim]``"""
    v_pages: Tensor | None
    """None: latents, which are keys and values."""
    pages: Tensor
    """int64 ``[tokens]``"""
    offsets: Tensor
    """int64 ``[tokens]``: in the page"""
    scales: tuple[float, float] = (1.0, 1.0)
    """Of fp8 keys and values: what is written is divided by them."""

    def write(self, pages: Tensor, rows: Tensor, scale: float = 1.0) -> None:
        """Write ``rows [tokens, kv_heads, dim]`` to ``k_pages`` or ``v_pages``."""
        rows = stored(to_fp8(rows, scale)) if pages.dtype is FP8 else rows
        stored(pages)[self.pages, :, self.offsets] = rows


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding of a step's tokens (arXiv:2104.09864): ``[tokens, 1, rope_dim]``, the two halves repeat."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights ``[head_dim]`` of norms over each head's query and key."""

    q: Tensor
    k: Tensor
    eps: float


class Elementwise(Protocol):
    """The operations of one implementation. A row's result depends on the row alone (law L14)."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square normalization (arXiv:1910.07467) of the last dimension.

        An fp32 weight on half-precision ``x`` is applied in fp32 (Gemma).
        """

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """``x + delta`` normalized (as it is, without a weight), and ``x + delta``. ``[tokens, hidden]``"""

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate the first elements of each head of ``x [tokens, heads, head_dim]``."""

    def rotate_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms | None, rotation: Rotation, places: Places
    ) -> Tensor:
        """Normalize and rotate queries and keys, and write keys and values. Returns the queries.

        ``q [tokens, heads, head_dim]``, ``k, v [tokens, kv_heads, head_dim]``, in rows of any stride.
        """

    def write_latents(
        self, latent: Tensor, weight: Tensor, eps: float, k_rope: Tensor, rotation: Rotation, places: Places
    ) -> None:
        """Normalize ``latent [tokens, rank]``, rotate ``k_rope [tokens, rope_dim]``, and write them side by side."""

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """``activation(gate) * up`` of ``[tokens, 2 * size]``, ``activation``: ``silu`` or ``gelu_pytorch_tanh``."""


class TorchElementwise:
    """The reference."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:
            return torch_rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
        return torch_rms_norm(x, x.shape[-1:], weight, eps)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + delta
        return total if weight is None else self.norm(total, weight, eps), total

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        dim = rotation.cos.shape[-1]
        turned, rest = x[..., :dim], x[..., dim:]
        rotated = torch.cat((-turned[..., dim // 2 :], turned[..., : dim // 2]), dim=-1)
        turned = turned * rotation.cos + rotated * rotation.sin
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    def rotate_and_write(
        self, q: Tensor, k: Tensor, v: Tensor, norms: HeadNorms | None, rotation: Rotation, places: Places
    ) -> Tensor:
        if norms is not None:
            q, k = self.norm(q, norms.q, norms.eps), self.norm(k, norms.k, norms.eps)
        places.write(places.k_pages, self.rotate(k, rotation), places.scales[0])
        assert places.v_pages is not None
        places.write(places.v_pages, v, places.scales[1])
        return self.rotate(q, rotation)

    def write_latents(
        self, latent: Tensor, weight: Tensor, eps: float, k_rope: Tensor, rotation: Rotation, places: Places
    ) -> None:
        rotated = self.rotate(k_rope[:, None, :], rotation)
        rows = torch.cat((self.norm(latent, weight, eps)[:, None, :], rotated), dim=-1)
        places.write(places.k_pages, rows)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (gelu(gate, approximate="tanh") if activation == "gelu_pytorch_tanh" else silu(gate)) * up
