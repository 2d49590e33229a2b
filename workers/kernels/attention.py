"""Attention as the models call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workers.kernels.paged_attention import HeadShape


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
        v_scale: float = 1.0,
    ) -> Tensor:
        """``paged_attention_reference`` over the plan's sequences, times ``v_scale``.

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


class DecodePlanner(Protocol):
    """Makes plans of decodes without knowing their contexts: for a graph, which is launched with any."""

    def __call__(
        self,
        tables: Tensor,
        context_lens: Tensor,
        page_size: int,
        *,
        heads: HeadShape,
        dtype: torch.dtype,
        kv_heads: int,
        most: int,
        window: int = 0,
    ) -> AttentionPlan:
        """The plan for one query of each sequence. ``context_lens``: on the device, at most ``most``."""
