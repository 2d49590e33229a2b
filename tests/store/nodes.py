"""Nodes with KV stores, and sessions whose KV they keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from tests.harness import HOST, Harness
from tests.waiting import until
from workers.store import client
from workers.store.copies import Copy
from workers.store.server import DiskConfig, KVStore

SLAB = 256 * 1024
NUM_BYTES = 16 * SLAB
SAMPLING = pb.Sampling(temperature=0.8, top_k=40, seed=5, max_tokens=12, ignore_eos=True)
Stub = session_pb2_grpc.SessionServiceStub


class HangingStore(KVStore):
    """A store that stops answering."""

    hangs = False

    async def Use(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in super().Use(requests, context):
            if self.hangs:
                await asyncio.sleep(60)
            yield answer


class Node:
    """A store, and another in its place."""

    def __init__(self, folder: Path, disk: DiskConfig | None) -> None:
        self.folder, self._disk = folder, disk
        self.store: HangingStore
        self.address = ""

    async def start(self) -> None:
        """Another one, if there was one."""
        self.store = HangingStore(self.folder, NUM_BYTES, SLAB, disk=self._disk)
        self.address = await self.store.start(HOST)


@asynccontextmanager
async def node(folder: Path, disk: DiskConfig | None = None) -> AsyncIterator[Node]:
    there = Node(folder, disk)
    await there.start()
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


def client_of(cluster: Harness) -> client.StoreClient:
    copies = cluster.workers["w0"]._copies
    assert copies is not None
    return copies.client


def copies_of(there: Node) -> list[Copy]:
    """The complete copies in a store."""
    return [copy for copy in there.store.contents.copies._copies.values() if copy.crc is not None]


async def lose_device_kv(cluster: Harness, worker: str = "w0") -> None:
    """As if other sessions had evicted all of it."""
    leader = cluster.workers[worker]._leader

    def lose() -> None:
        leader.cache.flush()
        assert leader.cache.index.events is not None
        leader.cache.index.events._flushed.clear()

    await asyncio.wrap_future(leader.call(lose))
