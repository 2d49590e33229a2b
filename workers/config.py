"""Settings of one rank's engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BUNDLED_MODEL = Path(__file__).parent / "models" / "bundled" / "holdfast-tiny"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Each limit is explained where it is enforced (``SchedulerLimits``)."""

    model: Path = BUNDLED_MODEL
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``auto`` (cuda where there is one)."""
    dtype: str = "auto"
    """Of activations. ``auto``: the checkpoint's on CUDA, float32 on CPU, with the checkpoint's weights."""
    kv_cache_dtype: str = "auto"
    """``auto``: as ``dtype``; ``fp8_e4m3``: half or a quarter of the memory, and rounded KV."""
    attention_backend: str = "auto"
    """The kernels: see ``kernels.backend``."""
    quantization: str | None = None
    """``int8``: a CPU's layers keep their weights in eight bits, with a factor for each output channel."""
    deterministic: bool = True
    """On CUDA, a row's result does not depend on its batch. Else torch chooses the products' order of summation."""
    tile_table: Path | None = None
    """The tiles of a GPU's kernels, as ``holdfast tune`` measured them: see ``kernels.tile_table``."""
    disable_cuda_graph: bool = False
    """On CUDA, launch each kernel of a decode from Python, which takes it longer than a GPU to compute most of them."""
    cuda_graph_max_bs: int = 256
    """The largest batch whose decode is captured as a graph: see ``engine.decode_graphs``."""
    page_size: int = 16
    context_length: int | None = None
    """None: the model's own limit."""
    max_total_tokens: int | None = None
    """KV capacity in tokens. None: by the available memory."""
    mem_fraction_static: float | None = None
    """Of a GPU's memory, for weights and KV; the rest is for graphs and activations. None: KV gets 85 % of what weights
    leave."""
    swa_full_tokens_ratio: float | None = None
    """Tokens of a window group for each of the groups that keep all. None: see ``engine.memory``."""
    zero_freed_pages: bool = False
    """Overwrite pages of KV that are freed."""
    resume_points: int = 1
    """Turns whose starts a session can go back to although a window has passed them."""
    expert_parallel: bool = False
    """The ranks of a group divide a model's experts among them, not each expert's width."""
    chunked_prefill_size: int | None = None
    """Tokens computed in a step. None: by the device (``engine.memory.step_tokens``)."""
    max_running_requests: int = 32
    max_queued_requests: int = 256
    max_sessions: int = 1024
    """Slots: sessions whose KV stays on this worker between turns; the least recently used is evicted first."""
    overlap_schedule: bool | None = None
    """Plan a step while the device computes the one before. None: on CUDA, where the host would wait otherwise."""
    grammar_timeout_s: float = 10.0
    """A turn whose grammar takes longer to compile is refused."""
    speculative_algorithm: str = "NONE"
    """``NGRAM``: drafts are looked up in a session's history, in predictions and in recent outputs. ``STANDALONE``: a
    smaller model proposes them; ``EAGLE3``: a head of one layer; ``MTP``: such a head in the model's own checkpoint."""
    speculative_draft_model_path: Path | None = None
    """The smaller model's or the head's checkpoint, with the same vocabulary."""
    speculative_num_draft_tokens: int = 16
    """Of a turn in a step, at most. Fewer where more would not pay."""
    kv_store: Path | None = None
    """The folder of the node's KV store, where filled pages are copied to. None: they are not."""
    kv_store_write_mb_per_s: float = 1000.0
    """What the copying of pages may take of the memory's bandwidth."""
    num_threads: int = 1
    rank_lease_s: float = 2.0
    """A leader and a follower that hear nothing from each other for this long end."""
    collective_timeout_s: float = 30.0
    """Deadline of a collective: longer than any step, shorter than a client's patience."""
