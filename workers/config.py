"""What one rank is told at its start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BUNDLED_MODEL = Path(__file__).parent / "models" / "bundled" / "holdfast-tiny"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Every limit is explained where it is enforced (``SchedulerLimits``)."""

    model: Path = BUNDLED_MODEL
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``auto`` (cuda where there is one)."""
    dtype: str = "auto"
    """``auto``: the checkpoint's on CUDA, float32 on CPU, where half precision is emulated or inexact."""
    page_size: int = 16
    context_length: int | None = None
    """None: what the model was made for."""
    max_total_tokens: int | None = None
    """KV capacity in tokens. None: by the memory that is there."""
    chunked_prefill_size: int = 512
    max_running_requests: int = 32
    max_queued_requests: int = 256
    max_sessions: int = 1024
    """Slots: sessions whose KV stays on this worker between turns; the least recently used go first."""
    num_threads: int = 1
    rank_lease_s: float = 2.0
    """Silence after which a rank takes its leader, or a leader its rank, for dead, and ends."""
    collective_timeout_s: float = 30.0
    """A collective that takes longer is an error: longer than any step, shorter than anyone's patience."""
