"""A rank's end of its node's store: the stream of requests, and the arena's memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
from pathlib import Path
from typing import Any

import grpc

from holdfast.errors import NoWorkerAvailable
from holdfast.v1 import store_pb2, store_pb2_grpc
from holdfast.wire import CHANNEL_OPTIONS, was_closed
from workers.store.server import socket_of

log = logging.getLogger("holdfast.store")
RETRY_S = 0.5
TIMEOUT_S = 2.0
"""Of one request: the store answers from memory, and one that is silent is as good as dead."""
LOST_MEANWHILE = "the node's KV store was lost meanwhile"


class StoreUnavailable(NoWorkerAvailable):
    """The node's store does not answer: nothing can be copied now."""


class StoreClient:
    """Connects again and again. Its calls raise StoreUnavailable while there is no store. For one event loop."""

    def __init__(self, folder: Path, space: str) -> None:
        self._folder, self._space = folder, space
        self.arena: memoryview | None = None
        """The store's memory, while there is one. Views of a former store's stay valid."""
        self._call: Any = None
        self._stub: Any = None
        self._lock = asyncio.Lock()
        self._lost = asyncio.Event()
        self._unpinning = set[asyncio.Task[None]]()
        self._task = asyncio.get_running_loop().create_task(self._stay_connected())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, *self._unpinning, return_exceptions=True)

    async def ask(self, **request: Any) -> Any:
        """Send a request (a field of ``StoreRequest``), and return the answer's field. Raises StoreUnavailable.

        A caller that is cancelled costs the others nothing: its answer is awaited, and what it pins is unpinned.
        """
        asking = asyncio.create_task(self._ask(store_pb2.StoreRequest(**request)))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            unpinning = asyncio.create_task(self._unpin(asking))
            self._unpinning.add(unpinning)
            unpinning.add_done_callback(self._unpinning.discard)
            raise

    async def _ask(self, request: store_pb2.StoreRequest) -> Any:
        async with self._lock:
            call = self._call
            if call is None:
                raise StoreUnavailable("the node's KV store is not there")
            return await self._exchange(call, request)

    async def _unpin(self, asking: asyncio.Task[Any]) -> None:
        with contextlib.suppress(StoreUnavailable):
            answer = await asking
            if isinstance(answer, store_pb2.Pinned):
                await self._ask(store_pb2.StoreRequest(unpin=store_pb2.UnpinCopies(pin=answer.pin)))

    async def find(self, wanted: store_pb2.WantedCopies) -> list[bytes]:
        """A Tier for each key, by group. Raises StoreUnavailable."""
        return list((await self._call_once("Find", wanted, TIMEOUT_S, is_lost=True)).tiers)

    async def bring(self, wanted: store_pb2.WantedCopies, timeout_s: float) -> None:
        """Have copies brought into memory, as far as there are. Raises StoreUnavailable."""
        await self._call_once("Bring", wanted, timeout_s, is_lost=False)

    async def _call_once(self, method: str, wanted: store_pb2.WantedCopies, timeout_s: float, *, is_lost: bool) -> Any:
        """``is_lost``: whether a store that does not answer in time is taken for dead."""
        call = self._call
        if call is None:
            raise StoreUnavailable("the node's KV store is not there")
        wanted.space = self._space
        try:
            return await getattr(self._stub, method)(wanted, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if is_lost or error.code() is grpc.StatusCode.UNAVAILABLE:
                self._lose(call)
            raise StoreUnavailable(f"the node's KV store does not answer: {error.code().name}") from None
        except asyncio.CancelledError:
            if was_closed():
                raise StoreUnavailable(LOST_MEANWHILE) from None
            raise

    async def _exchange(self, call: Any, request: store_pb2.StoreRequest) -> Any:
        answer: Any = grpc.aio.EOF
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await call.write(request)
                answer = await call.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
            self._lose(call)
            raise StoreUnavailable(f"the node's KV store does not answer: {error!r}") from None
        except asyncio.CancelledError:
            if was_closed():
                raise StoreUnavailable(LOST_MEANWHILE) from None
            raise
        if answer is grpc.aio.EOF:
            self._lose(call)
            raise StoreUnavailable("the node's KV store closed the stream")
        return getattr(answer, answer.WhichOneof("response"))

    def _lose(self, call: Any) -> None:
        call.cancel()
        if call is self._call:
            self._call, self._stub, self.arena = None, None, None
            self._lost.set()

    async def _stay_connected(self) -> None:
        while True:
            channel = grpc.aio.insecure_channel(socket_of(self._folder), options=CHANNEL_OPTIONS)
            try:
                stub = store_pb2_grpc.KVStoreServiceStub(channel)
                call = stub.Use()
                arena = await self._exchange(call, store_pb2.StoreRequest(open=store_pb2.OpenArena(space=self._space)))
                self._map(arena)
                self._lost.clear()
                self._call, self._stub = call, stub
                await self._lost.wait()
                log.warning("the node's KV store is gone; nothing is copied until it is back")
            except (StoreUnavailable, OSError):
                pass
            finally:
                self._call, self._stub, self.arena = None, None, None
                with contextlib.suppress(Exception):
                    await channel.close()
            await asyncio.sleep(RETRY_S)

    def _map(self, arena: store_pb2.Arena) -> None:
        with Path(arena.path).open("r+b") as file:
            self.arena = memoryview(mmap.mmap(file.fileno(), arena.size))
