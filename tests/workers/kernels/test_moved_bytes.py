"""The bytes that the kernels between products move: each load and store of each program, counted in the interpreter.

A layer's activations should come from memory once and go there once. What many programs share (weights, cosines, the
places of tokens) they have from a cache; it counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from workers.kernels.elementwise import HeadNorms, Places, Rotation
from workers.kernels.elementwise_launch import TritonElementwise
from workers.kernels.fp8 import FP8

TRITON, TOKENS, PAGE = TritonElementwise(), 4, 16


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).half()


def bytes_moved(patch: pytest.MonkeyPatch, shared: Sequence[torch.Tensor], act: Callable[[], object]) -> int:
    """Of ``act``'s kernels, where what is loaded from ``shared`` tensors counts once."""
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in shared]
    moved, seen = 0, set()

    def count(pointers: Any, mask: Any) -> None:
        nonlocal moved
        size = pointers.get_element_ty().primitive_bitwidth // 8
        for address in np.asarray(pointers.data)[np.asarray(mask.data)].tolist():
            is_shared = any(first <= address < end for first, end in ranges)
            moved += 0 if is_shared and address in seen else size
            seen.add(address)

    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def counted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        count(pointers, mask)
        return load(pointers, mask, *rest)

    def counted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count(pointers, mask)
        return store(pointers, value, mask, *rest)

    with patch.context() as patched:
        patched.setattr(interpreter_builder, "create_masked_load", counted_load)
        patched.setattr(interpreter_builder, "create_masked_store", counted_store)
        act()
    return moved


def size_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def places(kv_heads: int, dim: int, *, latent: bool = False, dtype: torch.dtype = torch.float16) -> Places:
    pages = [torch.zeros(TOKENS, kv_heads, PAGE, dim).to(dtype) for _ in range(2)]
    return Places(pages[0], None if latent else pages[1], torch.arange(TOKENS), torch.arange(TOKENS))


def test_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, table = torch.tensor([3, 0, 7, 5]), half(9, 3584)
    moved = bytes_moved(monkeypatch, [tokens], lambda: TRITON.embed(tokens, table, None, 7.5))
    least = size_of(tokens) + 2 * size_of(table[tokens])
    assert moved == least


def test_sum_and_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    x, delta, weight = half(TOKENS, 4096), half(TOKENS, 4096), half(4096)
    moved = bytes_moved(monkeypatch, [weight], lambda: TRITON.add_norm(x, delta, weight, 1e-6))
    least = size_of(x, delta, x, x, weight)
    assert moved == least


@pytest.mark.parametrize("rope", [128, 96, 32])
@pytest.mark.parametrize("dtype", [torch.float16, FP8])
@pytest.mark.parametrize("has_norms", [False, True])
def test_norm_rotation_and_write(
    rope: int, dtype: torch.dtype, has_norms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = half(TOKENS, 8, 128), half(TOKENS, 2, 128), half(TOKENS, 2, 128)
    rotation, to = Rotation(half(TOKENS, 1, rope), half(TOKENS, 1, rope)), places(2, 128, dtype=dtype)
    norms = HeadNorms(half(128), half(128), 1e-6) if has_norms else None
    shared = [rotation.cos, rotation.sin, to.pages, to.offsets, *((norms.q, norms.k) if norms else ())]
    moved = bytes_moved(monkeypatch, shared, lambda: TRITON.rotate_and_write(q, k, v, norms, rotation, to))
    least = size_of(*shared, q, q, k, v) + (k.numel() + v.numel()) * dtype.itemsize
    assert moved == least


def test_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    x, rotation = half(TOKENS, 16, 64), Rotation(half(TOKENS, 1, 64), half(TOKENS, 1, 64))
    moved = bytes_moved(monkeypatch, [rotation.cos, rotation.sin], lambda: TRITON.rotate(x, rotation))
    least = size_of(rotation.cos, rotation.sin, x, x)
    assert moved == least


def test_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    latent, k_rope, weight, to = half(TOKENS, 512), half(TOKENS, 64), half(512), places(1, 576, latent=True)
    rotation = Rotation(half(TOKENS, 1, 64), half(TOKENS, 1, 64))
    shared = [rotation.cos, rotation.sin, weight, to.pages, to.offsets]
    moved = bytes_moved(monkeypatch, shared, lambda: TRITON.write_latents(latent, weight, 1e-6, k_rope, rotation, to))
    least = size_of(*shared, latent, latent, k_rope, k_rope)
    assert moved == least


def test_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up = half(TOKENS, 2 * 1500)
    assert bytes_moved(monkeypatch, [], lambda: TRITON.gated(gate_up, "silu")) == 3 * size_of(gate_up) // 2
