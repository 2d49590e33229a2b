"""The memory of KV on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workers.config import BUNDLED_MODEL
from workers.kernels.fp8 import FP8, stored
from workers.models import KVPool
from workers.models.config import read_config

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(address: int) -> set[str]:
    """The kernel's flags of the mapping that has an address; see ``proc(5)``, smaps."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return set(rest.split())
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=["fp32", "bf16", "fp8"])
def test_kv_is_zero_and_in_huge_pages(dtype: torch.dtype) -> None:
    pool = KVPool(read_config(BUNDLED_MODEL), [600], 16, dtype, torch.device("cpu"))
    parts = [stored(part) for part in (*pool.k, *pool.v) if part is not None]
    assert not any(part.any() for part in parts)
    for i, part in enumerate(parts):
        part.fill_(i + 1)
    assert [int(part.max()) for part in parts] == [int(part.min()) for part in parts] == list(range(1, len(parts) + 1))
    if HUGE_PAGES.exists():
        assert all("hg" in flags_of(part.data_ptr()) for part in parts)
