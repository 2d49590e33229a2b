"""The memory of KV: on a CPU its kind, on a GPU that is not there what reads and writes queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.parity.test_fake_cuda import CUDA, parts_on_device
from workers.config import BUNDLED_MODEL
from workers.kernels import upload
from workers.kernels.fp8 import FP8, stored
from workers.models import KVPool, kv_pool
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_pages_of_a_gpu_are_gathered_and_written_there(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def bytes_on_device(data: bytes, device: torch.device) -> torch.Tensor:
        return torch.empty(len(data), dtype=torch.uint8, device=device)

    class Side:
        def __init__(self, device: torch.device) -> None:
            assert device == CUDA

        def read(self, gather: Callable[[], torch.Tensor]) -> torch.Tensor:
            gathered.append(gather())
            raise Read  # a fake tensor's values cannot be had

    class Read(Exception):
        pass

    monkeypatch.setattr(kv_pool, "upload_parts", parts_on_device)
    monkeypatch.setattr(kv_pool, "upload_bytes", bytes_on_device)
    monkeypatch.setattr(kv_pool, "SideStream", Side)
    gathered = list[torch.Tensor]()
    with FakeTensorMode():
        pool = KVPool(read_config(BUNDLED_MODEL), [60], 16, dtype, CUDA)
        size = pool.page_bytes[0]
        with pytest.raises(Read):
            pool.read_pages_into(0, [1, 7], [memoryview(bytearray(size))] * 2)
        pool.write_pages(0, [3, 4, 5], bytes(3 * size))
        pool.zero_pages(0, [3, 4])
    assert [(each.shape, each.dtype, each.device) for each in gathered] == [((2, size), torch.uint8, CUDA)]


def test_reads_beside_the_steps_wait_for_those_that_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            pass

        def wait_stream(self, other: str) -> None:
            done.append(f"after {other}")

    @contextmanager
    def stream(used: Stream) -> Iterator[None]:
        done.append("begin")
        yield
        done.append("end")

    def gather() -> torch.Tensor:
        done.append("gather")
        return torch.ones(3)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the steps")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    assert upload.SideStream(CUDA).read(gather).tolist() == [1, 1, 1]
    assert done == ["after the steps", "begin", "gather", "end"]
