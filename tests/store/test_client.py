"""Requests of one rank to its node's store share a stream: what becomes of one says nothing of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.v1 import store_pb2
from tests.store.nodes import NUM_BYTES, SLAB
from tests.waiting import until
from workers.kv.prefix import DIGEST_BYTES
from workers.store.client import StoreClient, StoreUnavailable
from workers.store.server import KVStore

KEY, PAGE_BYTES = bytes(DIGEST_BYTES), 4096


class HeldStore(KVStore):
    """A store that answers when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, NUM_BYTES, SLAB)
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_held = 0

    async def Bring(self, request: Any, context: Any) -> Any:
        await self._held()
        return await super().Bring(request, context)

    async def Use(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in super().Use(requests, context):
            await self._held()
            yield answer

    async def _held(self) -> None:
        self.num_held += not self.answers.is_set()
        await self.answers.wait()


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[HeldStore, StoreClient]]:
    """A store with one copy, and a rank's client."""
    store = HeldStore(folder / "store")
    await store.start()
    client = StoreClient(folder / "store", "a space")
    try:
        await until(lambda: client.arena is not None, 10, "the client to connect")
        await client.ask(reserve=store_pb2.ReserveCopies(keys=KEY, page_bytes=PAGE_BYTES, session_ids=["s"]))
        await client.ask(complete=store_pb2.CompleteCopies(keys=KEY, crcs=[1], written=[True]))
        yield store, client
    finally:
        await client.stop()
        await store.stop()


def pin() -> store_pb2.PinCopies:
    return store_pb2.PinCopies(groups=[store_pb2.KeysOfGroup(keys=KEY)], session_id="s")


async def test_a_cancelled_request_costs_no_other_its_answer_and_leaves_nothing_pinned(tmp_path: Path) -> None:
    async with connected(tmp_path) as (store, client):
        (copy,) = store.contents.copies._copies.values()
        arena = client.arena
        store.answers.clear()
        pinning = asyncio.create_task(client.ask(pin=pin()))
        await until(lambda: store.num_held, 10, "the request to arrive")
        assert copy.num_pins == 1
        other = asyncio.create_task(client.ask(stats=store_pb2.StoreStatsRequest()))
        pinning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pinning
        store.answers.set()
        assert (await other).copies == 1
        await until(lambda: not copy.num_pins, 10, "the copy to be unpinned")
        assert client.arena is arena, "the connection is the same"
        pinned = await client.ask(pin=pin())
        assert pinned.groups[0].offsets == [copy.offset] and copy.num_pins == 1


async def test_a_request_on_a_connection_that_another_gave_up_is_told_so(tmp_path: Path) -> None:
    async with connected(tmp_path) as (store, client):
        store.answers.clear()
        asking = asyncio.create_task(client.ask(stats=store_pb2.StoreStatsRequest()))
        bringing = asyncio.create_task(client.bring(store_pb2.WantedCopies(), 10))
        await until(lambda: store.num_held == 2, 10, "the requests to arrive")
        client._lose(client._call)
        for each in asking, bringing:
            with pytest.raises(StoreUnavailable):
                await each
        store.answers.set()
        await until(lambda: client.arena is not None, 10, "another connection")
        assert (await client.ask(stats=store_pb2.StoreStatsRequest())).copies == 1
