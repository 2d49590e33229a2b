"""Which implementation of the kernels an engine runs."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

from holdfast.errors import ConfigError
from workers.kernels.attention import Planner
from workers.kernels.elementwise import Elementwise, TorchElementwise
from workers.kernels.grouped_experts import Experts, TorchExperts
from workers.kernels.paged_attention import plan_attention
from workers.kernels.products import Products, TorchProducts

BACKENDS = ("auto", "torch_native", "triton")
"""SGLang's names of attention backends. ``auto``: Triton on CUDA, torch elsewhere."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The kernels of one implementation."""

    plan_attention: Planner
    elementwise: Elementwise
    experts: Experts
    products: Products


TORCH = Backend(plan_attention, TorchElementwise(), TorchExperts(), TorchProducts())


def load_backend(name: str, device: torch.device, *, deterministic: bool = True) -> Backend:
    """``deterministic``: a row's result does not depend on its batch, products included. Raises ConfigError."""
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend: {name!r} is not one of {', '.join(BACKENDS)}")
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "auto":
        name = "triton" if device.type == "cuda" and has_triton else "torch_native"
    if name == "torch_native":
        return TORCH
    if not has_triton:
        raise ConfigError("attention_backend: triton is not installed; a CUDA build of torch brings it")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("attention_backend: triton needs a GPU; on CPU it runs in its interpreter alone, for tests")
    # A CPU engine never loads it.
    from workers.kernels.attention_launch import plan_triton_attention
    from workers.kernels.elementwise_launch import TritonElementwise
    from workers.kernels.experts_launch import TritonExperts
    from workers.kernels.products_launch import TritonProducts

    products = TritonProducts() if deterministic else TorchProducts()
    return Backend(plan_triton_attention, TritonElementwise(), TritonExperts(), products)
