"""Pages that are read beside the steps of a GPU, and pages that are written there."""

from __future__ import annotations

import threading

import pytest
import torch

from workers.config import BUNDLED_MODEL
from workers.kernels.fp8 import FP8, stored
from workers.models import KVPool
from workers.models.config import read_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BUSY_CYCLES = 400_000_000
"""A fifth of a second, for which the steps' stream has work."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_what_is_queued_is_read(dtype: torch.dtype) -> None:
    cuda, pages = torch.device("cuda"), [3, 60, 1]
    pool, other = (KVPool(read_config(BUNDLED_MODEL), [64], 16, dtype, cuda) for _ in range(2))
    parts = [stored(part).view(torch.uint8) for part in (*pool.k, *pool.v) if part is not None]
    random = [torch.randint(0, 255, part.shape, dtype=torch.uint8, device=cuda) for part in parts]
    for round_ in range(3):  # a buffer that is used again has nothing of the round before
        into = [bytearray(pool.page_bytes[0]) for _ in pages]
        views = [memoryview(each) for each in into]
        torch.cuda._sleep(BUSY_CYCLES)
        for part, values in zip(parts, random, strict=True):
            part.copy_(values + round_)
        reader = threading.Thread(target=pool.read_pages_into, args=(0, pages, views))
        reader.start()
        reader.join()
        assert [bytes(each) for each in into] == pool.read_pages(0, pages)
        other.write_pages(0, [7, 8, 9], memoryview(b"".join(into)))
        assert other.read_pages(0, [7, 8, 9]) == pool.read_pages(0, pages)
        other.zero_pages(0, [8])
        assert not any(other.read_pages(0, [8])[0]) and any(other.read_pages(0, [7])[0])
