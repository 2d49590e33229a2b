"""Which implementation of the kernels an engine runs."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.errors import ConfigError
from workers.kernels.attention import DecodePlanner, Planner
from workers.kernels.cpu.library import load_library
from workers.kernels.cpu.operations import CpuElementwise, CpuExperts, CpuProducts
from workers.kernels.cpu.sampling import CpuSampling
from workers.kernels.cpu.tape import Tape
from workers.kernels.elementwise import Elementwise, TorchElementwise
from workers.kernels.grouped_experts import Experts, TorchExperts
from workers.kernels.paged_attention import plan_attention
from workers.kernels.products import Products, TorchProducts
from workers.kernels.sampling import TORCH_SAMPLING, Sampling
from workers.kernels.tiles import BY_RULE, Tiles

BACKENDS = ("auto", "torch_native", "triton", "cpu")
"""SGLang's names of attention backends, and ours. ``auto``: Triton on CUDA; on CPU its own, if they can be compiled."""
QUANTIZATIONS = ("int8",)
CPU_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Backend:
    """The kernels of one implementation."""

    plan_attention: Planner
    elementwise: Elementwise
    experts: Experts
    products: Products
    tape: Tape | None = None
    """What its operations are recorded on: they compute nothing themselves."""
    sampling: Sampling = TORCH_SAMPLING
    plan_decodes: DecodePlanner | None = None
    """None: its launches depend on what a batch holds, and cannot be captured as a graph."""


TORCH = Backend(plan_attention, TorchElementwise(), TorchExperts(), TorchProducts())


def load_backend(
    name: str,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    deterministic: bool = True,
    quantization: str | None = None,
    num_threads: int = 1,
    tiles: Tiles = BY_RULE,
) -> Backend:
    """``dtype``: of activations. ``deterministic``: on CUDA, a row's result does not depend on its batch, products
    included. ``quantization``: of layers' weights, ``int8`` on CPU. ``tiles``: of
    Triton's kernels.

    Raises ConfigError.
    """
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend: {name!r} is not one of {', '.join(BACKENDS)}")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization: {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    chosen = _chosen(name, device, dtype)
    if quantization is not None and chosen != "cpu":
        raise ConfigError(f"quantization: {quantization} is for the kernels of a CPU, and these are {chosen}")
    if chosen == "torch_native":
        return TORCH
    if chosen == "cpu":
        return _cpu(device, dtype, quantization, num_threads)
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("attention_backend: triton is not installed; a CUDA build of torch brings it")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("attention_backend: triton needs a GPU; on CPU it runs in its interpreter alone, for tests")
    # A CPU engine never loads it.
    from workers.kernels.attention_launch import plan_triton_attention, plan_triton_decodes
    from workers.kernels.elementwise_launch import TritonElementwise
    from workers.kernels.experts_launch import TritonExperts
    from workers.kernels.products_launch import TritonProducts

    return Backend(
        partial(plan_triton_attention, tiles=tiles),
        TritonElementwise(),
        TritonExperts(tiles),
        TritonProducts(tiles) if deterministic else TorchProducts(),
        plan_decodes=partial(plan_triton_decodes, tiles=tiles),
    )


def _chosen(name: str, device: torch.device, dtype: torch.dtype) -> str:
    if name != "auto":
        return name
    if device.type == "cuda":
        return "triton" if importlib.util.find_spec("triton") is not None else "torch_native"
    return "cpu" if dtype in CPU_DTYPES and load_library() is not None else "torch_native"


def _cpu(device: torch.device, dtype: torch.dtype, quantization: str | None, num_threads: int) -> Backend:
    if device.type != "cpu":
        raise ConfigError(f"attention_backend: cpu does not run on {device.type}")
    if dtype not in CPU_DTYPES:
        raise ConfigError(f"attention_backend: cpu computes in float32 or bfloat16, not in {dtype}")
    library = load_library()
    if library is None:
        raise ConfigError("attention_backend: cpu needs a C++20 compiler, and its log says what is missing")
    tape = Tape(library, dtype, num_threads)
    return Backend(
        plan_attention,
        CpuElementwise(tape),
        CpuExperts(tape),
        CpuProducts(tape, quantization),
        tape,
        CpuSampling(tape),
    )
