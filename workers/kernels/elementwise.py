"""What a layer does between its products: norms, rotary embeddings, writes of KV, activations.

``Elementwise`` is what the models call. ``TorchElementwise`` defines it and runs on CPU; on GPUs
``TritonElementwise`` does each in one kernel, which reads and writes every element once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, silu
from torch.nn.functional import rms_norm as torch_rms_norm

from workers.kernels.fp8 import FP8, stored, to_fp8
from workers.kernels.products import Weight, as_tensor


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

    def embed(self, tokens: Tensor, table: Weight, part: tuple[int, int] | None, scale: float) -> Tensor:
        """Rows ``tokens`` of ``table``, times ``scale``: ``[tokens, hidden]``.

        ``part``: the table holds these rows of a whole one; other tokens are zeros.
        """

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        """Rows ``index`` of ``x [rows, width]``."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square normalization (arXiv:1910.07467) of the last dimension.

        An fp32 weight on half-precision ``x`` is applied in fp32 (Gemma).
        """

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """``x + delta`` normalized (as it is, without a weight), and ``x + delta``. ``[tokens, hidden]``"""

    def norm_both(self, x: Tensor, x_weight: Tensor, y: Tensor, y_weight: Tensor, eps: float) -> Tensor:
        """``norm`` of ``x`` and of ``y``, both ``[tokens, hidden]``, side by side."""

    def mean_squares(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The mean squares of the parts' rows, fp32 ``[tokens, parts]``."""

    def scaled_norm(self, x: Tensor, mean_squares: Tensor, ranks: int, weight: Tensor, eps: float) -> Tensor:
        """``norm`` of rows that are shares of ``ranks``, by the sum of their mean squares ``[tokens]``."""

    def rotate(self, x: Tensor, rotation: Rotation, rest: Tensor | None = None) -> Tensor:
        """Rotate the first elements of each head of ``x [tokens, heads, head_dim]``.

        ``rest [tokens, heads, dim]`` comes before them in the result.
        """

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

    def add_gated(self, x: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
        """``x + shared * sigmoid(gate)``, ``gate [tokens, 1]``."""


class TorchElementwise:
    """The reference."""

    def embed(self, tokens: Tensor, table: Weight, part: tuple[int, int] | None, scale: float) -> Tensor:
        rows = as_tensor(table)
        if part is None:
            found = embedding(tokens, rows)
        else:
            first, end = part
            mine = (tokens >= first) & (tokens < end)
            found = embedding((tokens - first).clamp(0, max(0, end - first - 1)), rows) * mine[:, None]
        return found if scale == 1.0 else found * scale

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(0, index)

    def mean_squares(self, parts: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([part.float().square().mean(-1) for part in parts], dim=1)

    def scaled_norm(self, x: Tensor, mean_squares: Tensor, ranks: int, weight: Tensor, eps: float) -> Tensor:
        return (x.float() * torch.rsqrt(mean_squares / ranks + eps)[:, None]).to(x.dtype) * weight

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:
            return torch_rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
        return torch_rms_norm(x, x.shape[-1:], weight, eps)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + delta
        return total if weight is None else self.norm(total, weight, eps), total

    def norm_both(self, x: Tensor, x_weight: Tensor, y: Tensor, y_weight: Tensor, eps: float) -> Tensor:
        return torch.cat((self.norm(x, x_weight, eps), self.norm(y, y_weight, eps)), dim=-1)

    def rotate(self, x: Tensor, rotation: Rotation, rest: Tensor | None = None) -> Tensor:
        dim = rotation.cos.shape[-1]
        turned, kept = x[..., :dim], x[..., dim:]
        rotated = torch.cat((-turned[..., dim // 2 :], turned[..., : dim // 2]), dim=-1)
        parts = (turned * rotation.cos + rotated * rotation.sin, kept)
        return torch.cat(parts if rest is None else (rest, *parts), dim=-1)

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

    def add_gated(self, x: Tensor, shared: Tensor, gate: Tensor | None) -> Tensor:
        return x + (shared if gate is None else shared * torch.sigmoid(gate))
