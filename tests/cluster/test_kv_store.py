"""``holdfast serve --hicache-size``: sessions outlive their workers by copies of their KV, and stores may die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.served import Served, serving
from tests.waiting import until


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("stores"), "--hicache-size", "0.25") as cluster:
        yield cluster


def turn(served: Served, session: str, text: str) -> str:
    """A turn's answer."""
    body = {"prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"X-Session-ID": session}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=60).json()
    return str(answer["choices"][0]["text"])


def counters(served: Served) -> dict[str, int]:
    total: dict[str, int] = {}
    for worker in served.workers():
        for name, count in worker["counters"].items():
            total[name] = total.get(name, 0) + int(count)
    return total


def store_process(served: Served) -> psutil.Process:
    children = psutil.Process(served.process.pid).children(recursive=True)
    (store,) = [process for process in children if process.name().startswith("ray::KVStore")]
    return store


LONG = " ".join(f"line {i} of a long text;" for i in range(120))


async def test_a_killed_workers_session_is_loaded_not_computed(served: Served) -> None:
    text = LONG + turn(served, "storm", LONG)
    await until(lambda: counters(served).get("kv_pages_copied", 0) >= 60, 20, "copies")
    killed: Any = served.worker_of("storm")
    os.kill(int(killed["pid"]), signal.SIGKILL)
    assert turn(served, "storm", text + " And then")
    after = served.worker_of("storm")["counters"]
    assert int(after["kv_tokens_loaded"]) > 1000 and int(after["computed_tokens"]) < 60
    await served.whole()
    assert all(report["ok"] for report in served.ask("audit"))


async def test_a_killed_store_costs_copies_and_no_turn(served: Served) -> None:
    store = store_process(served)
    os.kill(store.pid, signal.SIGKILL)
    assert turn(served, "after", LONG)
    await until(lambda: store_process_is_new(served, store.pid), 30, "another store")
    before = counters(served).get("kv_pages_copied", 0)

    def copies_again() -> bool:
        turn(served, "again", f"{time.monotonic()} " * 20)
        return counters(served).get("kv_pages_copied", 0) > before

    await until(copies_again, 30, "copies in the new store")


def store_bytes(served: Served) -> int:
    return sum(int(worker["kv_store"].get("bytes_total", 0)) for worker in served.workers())


def store_process_is_new(served: Served, pid: int) -> bool:
    try:
        return store_process(served).pid != pid
    except ValueError:
        return False


async def test_a_restarted_cluster_finds_its_sessions_kv_on_the_disk(tmp_path: Path) -> None:
    """Its memory is a multiple of what its workers hold: 8,192 tokens of 4 KB."""
    flags = ("--workers", "1", "--hicache-ratio", "4", "--max-total-tokens", "8192", "--kv-disk-size", "0.5")
    disk = ("--kv-disk-path", str(tmp_path / "disk"))
    with serving(tmp_path, *flags, *disk) as cluster:
        texts = {name: f"{name}: {LONG}" for name in ("a", "b")}
        await until(lambda: store_bytes(cluster) == 4 * 8192 * 4096, 20, "the store's size")
        for name in texts:
            texts[name] += turn(cluster, name, texts[name])
        pages = sum(session["num_tokens"] // 16 for session in cluster.ask("sessions"))
        assert pages > 120
        await until(lambda: counters(cluster).get("kv_pages_copied", 0) >= pages, 20, "copies")
        segments = lambda: sum(path.stat().st_size for path in (tmp_path / "disk").glob("0/segment-*"))  # noqa: E731
        await until(lambda: segments() > pages * 65_536, 20, "copies on the disk")
    with serving(tmp_path, *flags, *disk) as cluster:
        await until(lambda: store_bytes(cluster) > 0, 20, "the rank to find the store")
        for name, text in texts.items():
            assert turn(cluster, name, f"{text} And then")
        found = counters(cluster)
        assert found["kv_loads"] == 2 and found["kv_tokens_loaded"] > 2000 and found["computed_tokens"] < 120


def test_an_arena_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"hicache_size: .* bytes do not fit in"):
        Served(tmp_path, "--hicache-size", "100000")
