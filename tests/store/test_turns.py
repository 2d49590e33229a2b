"""Sessions come back by copies of their pages: after an eviction, and when their worker has died."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc, store_pb2
from tests.harness import Harness, running
from tests.parity.matrix import CONFIG, checkpoint
from tests.waiting import until
from workers.store.server import KVStore

MB = 1024 * 1024
SAMPLING = pb.Sampling(temperature=0.8, top_k=40, seed=5, max_tokens=12, ignore_eos=True)
Stub = session_pb2_grpc.SessionServiceStub


class Node:
    """A store, and what its folder is to be called."""

    def __init__(self, folder: Path, num_bytes: int = 64 * MB) -> None:
        self.folder, self._num_bytes = folder, num_bytes
        self.store = KVStore(folder, num_bytes, slab_bytes=MB)

    async def restart(self) -> None:
        await self.store.stop()
        self.store = KVStore(self.folder, self._num_bytes, slab_bytes=MB)
        await self.store.start()


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[Node]:
    there = Node(folder)
    await there.store.start()
    try:
        yield there
    finally:
        await there.store.stop()


def words(seed: int, count: int) -> list[int]:
    return [10 + (seed * 131 + i * 17) % 1500 for i in range(count)]


async def turn(stub: Any, session: str, tokens: list[int]) -> tuple[list[int], int]:
    """A turn's output, and how many tokens it found."""
    said: list[int] = []
    cached = 0
    request = pb.GenerateRequest(session_id=session, tokens=pb.TokenIds(ids=tokens), sampling=SAMPLING)
    async for answer in stub.Generate(request):
        said += answer.tokens
        cached = answer.cached_tokens
    return said, cached


def counters(cluster: Harness, worker: str) -> Any:
    return cluster.workers[worker]._stats().counters


async def copied(cluster: Harness, worker: str) -> None:
    """Returns when all ranks' pages are copied."""
    ranks = [cluster.workers[worker], *cluster.followers[worker]]
    for rank in ranks:
        copies = rank._copies
        assert copies is not None
        await until(lambda copies=copies: copies.counters["kv_pages_copied"] and not copies.num_waiting, 10, "copies")


async def stored(cluster: Harness, worker: str) -> store_pb2.StoreStats:
    copies = cluster.workers[worker]._copies
    assert copies is not None
    return await copies.client.ask(stats=store_pb2.StoreStatsRequest())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["full", "latent", "full + window", "window"])
async def test_a_lost_workers_session_comes_back_by_its_copies(kind: str, tp: int, tmp_path: Path) -> None:
    plain = replace(CONFIG, model=checkpoint(kind))
    engine = replace(plain, kv_store=tmp_path / "store")
    first, second = words(1, 300), words(2, 5)
    async with running(tmp_path / "a", num_workers=1, engine=plain, tp=tp) as cluster, cluster.channel() as channel:
        expected = [(await turn(Stub(channel), "s", tokens))[0] for tokens in (first, second)]
    async with (
        node(tmp_path / "store"),
        running(tmp_path / "b", num_workers=2, engine=engine, tp=tp) as cluster,
        cluster.channel() as channel,
    ):
        stub = Stub(channel)
        assert (await turn(stub, "s", first))[0] == expected[0]
        before = cluster.pinned_to("s")
        await copied(cluster, before)
        await cluster.lose_worker(before)
        said, cached = await turn(stub, "s", second)
        (after,) = cluster.workers
        assert said == expected[1] and cached >= 300 + 12 - 8, "all but the last pages came from the store"
        assert counters(cluster, after)["kv_tokens_loaded"] == cached
        await cluster.assert_no_leak()
