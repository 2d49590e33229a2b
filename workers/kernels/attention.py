"""Attention as the models call it, and which implementation runs it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from holdfast.errors import ConfigError
from workers.kernels.paged_attention import HeadShape, plan_attention

BACKENDS = ("auto", "torch_native", "triton")
"""SGLang's names. ``auto``: Triton on CUDA, torch elsewhere."""


class AttentionPlan(Protocol):
    """What all layers of a KV group share in a step: whose pages are read, and by which queries."""

    def attend(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor | None,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        v_dim: int = 0,
    ) -> Tensor:
        """``paged_attention_reference`` over the plan's sequences.

        ``v_pages`` None: a position's value is the first ``v_dim`` elements of its key (latent attention).
        """


class Planner(Protocol):
    """Makes the plans of one implementation."""

    def __call__(
        self,
        tables: Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        page_size: int,
        *,
        heads: HeadShape,
        dtype: torch.dtype,
        window: int = 0,
    ) -> AttentionPlan:
        """The plan for a batch. ``tables [sequences, max_pages]``; ``dtype``: of the queries."""


def attention_planner(backend: str, device: torch.device) -> Planner:
    """The planner of a backend. Raises ConfigError."""
    if backend not in BACKENDS:
        raise ConfigError(f"attention_backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    has_triton = importlib.util.find_spec("triton") is not None
    if backend == "auto":
        backend = "triton" if device.type == "cuda" and has_triton else "torch_native"
    if backend == "torch_native":
        return plan_attention
    if not has_triton:
        raise ConfigError("attention_backend: triton is not installed; a CUDA build of torch brings it")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError("attention_backend: triton needs a GPU; on CPU it runs in its interpreter alone, for tests")
    # A CPU engine never loads it.
    from workers.kernels.attention_launch import plan_triton_attention

    return plan_triton_attention
