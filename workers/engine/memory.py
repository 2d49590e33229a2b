"""How a rank's KV memory is divided into pages: how many each KV group gets."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from holdfast.errors import ConfigError
from workers.config import EngineConfig
from workers.kv import GroupKind, GroupSpec
from workers.kv.groups import window_pages
from workers.models import ModelConfig
from workers.models.kv_pool import page_sizes_bytes

CPU_KV_TOKENS = 65_536
CPU_KV_MEMORY_FRACTION = 0.2
CUDA_KV_MEMORY_FRACTION = 0.85
CPU_STEP_TOKENS, CUDA_STEP_TOKENS, SMALL_CUDA_STEP_TOKENS = 512, 8192, 2048
LARGE_CUDA_MEMORY = 40 * 2**30
SESSION_TOKENS = 4096
"""What a session is taken to hold, where the share of window groups is computed."""


def pages_by_group(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    draft: ModelConfig | None = None,
) -> list[int]:
    """The pages of each KV group of ``model`` (this rank's shard), by ``max_total_tokens`` or by free memory.

    ``draft``: a model whose KV lies in the pages of one of the groups, one that keeps every token.

    Raises ConfigError if ``swa_full_tokens_ratio`` leaves a window group fewer than one turn needs, or
    ``mem_fraction_static`` nothing.
    """
    sizes = page_sizes_bytes(model, config.page_size, dtype)
    if draft is not None:
        sizes[host_group(model)] += sum(page_sizes_bytes(draft, config.page_size, dtype))
    pages = _by_memory(config, model, sizes, device)
    for group, ours in zip(model.kv_groups, pages, strict=True):
        needed = min(max(pages), _pages_of_a_turn(config, group.window))
        if group.window and ours < needed:
            raise ConfigError(
                f"swa_full_tokens_ratio: {config.swa_full_tokens_ratio} leaves {ours} pages for the window of "
                f"{group.window} tokens, and a turn needs {needed}; raise it, or lower chunked_prefill_size"
            )
    return pages


def step_tokens(config: EngineConfig, device: torch.device) -> int:
    """Tokens that a step computes: as many as keep the device busy, for decodes wait as long."""
    if config.chunked_prefill_size is not None:
        return config.chunked_prefill_size
    if device.type != "cuda":
        return CPU_STEP_TOKENS
    memory = torch.cuda.get_device_properties(device).total_memory
    return CUDA_STEP_TOKENS if memory >= LARGE_CUDA_MEMORY else SMALL_CUDA_STEP_TOKENS


def host_group(target: ModelConfig) -> int:
    """The KV group of ``target`` whose pages hold a draft model's KV: one that keeps every token. -1: none does."""
    return next((i for i, group in enumerate(target.kv_groups) if not group.window), -1)


def _by_memory(config: EngineConfig, model: ModelConfig, sizes: list[int], device: torch.device) -> list[int]:
    if config.max_total_tokens is not None:
        return _divide(config, model, -(-config.max_total_tokens // config.page_size))
    if device.type == "cuda":
        budget, most = _cuda_budget(config.mem_fraction_static, device), None
    elif config.mem_fraction_static is not None:
        raise ConfigError("mem_fraction_static: is of a GPU's memory; on a CPU, max_total_tokens says how much KV gets")
    else:
        budget = int(psutil.virtual_memory().available * CPU_KV_MEMORY_FRACTION)
        most = CPU_KV_TOKENS // config.page_size
    low, high = 2, most if most is not None else max(2, budget // min(sizes))
    while low < high:  # the most pages whose division fits
        pages = (low + high + 1) // 2
        if sum(n * size for n, size in zip(_divide(config, model, pages), sizes, strict=True)) <= budget:
            low = pages
        else:
            high = pages - 1
    return _divide(config, model, low)


def _cuda_budget(fraction: float | None, device: torch.device) -> int:
    """Bytes for KV on a device that has the weights already. What is left is for graphs and activations."""
    free, total = torch.cuda.mem_get_info(device)
    if fraction is None:
        return int(free * CUDA_KV_MEMORY_FRACTION)
    budget = free - int(total * (1.0 - fraction))
    if budget <= 0:
        raise ConfigError(
            f"mem_fraction_static: {fraction} of the GPU's {total / 2**30:.1f} GB leaves nothing for KV beside the "
            f"{(total - free) / 2**30:.1f} GB that weights and others use; raise it, or use more GPUs"
        )
    return budget


def group_specs(model: ModelConfig, num_pages: Sequence[int]) -> list[GroupSpec]:
    """The KV core's groups for a model's."""
    pairs = zip(model.kv_groups, num_pages, strict=True)
    return [GroupSpec(GroupKind(group.kind), pages, group.window) for group, pages in pairs]


def _divide(config: EngineConfig, model: ModelConfig, pages: int) -> list[int]:
    """Pages by group, where a group that keeps every token has ``pages``."""
    if all(group.window for group in model.kv_groups):
        return [pages for _ in model.kv_groups]
    return [_window_pages(config, group.window, pages) if group.window else pages for group in model.kv_groups]


def _window_pages(config: EngineConfig, window: int, pages: int) -> int:
    """The pages of a window group beside whole-prefix groups of ``pages``."""
    size, points = config.page_size, config.resume_points
    if config.swa_full_tokens_ratio is not None:
        return max(2, min(pages, int(pages * config.swa_full_tokens_ratio)))
    # As many idle sessions as the other groups hold ...
    for_idle = int(pages * (points + 1) * (window + size) / SESSION_TOKENS)
    # ... and a full batch, so that no turn is retracted for its windows.
    for_batch = (config.max_running_requests - 1) * (points + 2) * (-(-window // size) + 1)
    return max(2, min(pages, for_idle + for_batch + _pages_of_a_turn(config, window)))


def _pages_of_a_turn(config: EngineConfig, window: int) -> int:
    """What a turn can hold of a window group, and one page for a copy on write."""
    assert config.chunked_prefill_size is not None, "a rank fills it in"
    return window_pages(window, config.page_size, config.resume_points, config.chunked_prefill_size) + 1
