"""A rank's end of its node's store: the stream of requests, and the arena's memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
from collections import deque
from collections.abc import Iterable, Sequence
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
MAX_TOGETHER = 64
"""Requests in one message. Each message costs both sides more than most requests do."""
CLOSED = "the connection to the node's KV store is closed"
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
        self._lost = asyncio.Event()
        self._waiting: deque[tuple[store_pb2.StoreRequest, asyncio.Future[Any]]] = deque()
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._stay_connected())
        self._asking: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        tasks = [task for task in (self._task, self._asking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(self._waiting, StoreUnavailable(CLOSED))
        self._waiting.clear()

    async def ask(self, **request: Any) -> Any:
        """Send a request (a field of ``StoreRequest``), and return the answer's field. Raises StoreUnavailable.

        A caller that is cancelled costs the others nothing: its answer is awaited, and what it pins is unpinned.
        """
        answer = self._put(store_pb2.StoreRequest(**request))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(self._unpin_answer)
            raise

    def unpin(self, pin: int, damaged: Sequence[store_pb2.KeysOfGroup] = ()) -> None:
        """``damaged``: those of them that do not match their checksums. Does not wait: a lost store has no pins."""
        request = store_pb2.StoreRequest(unpin=store_pb2.UnpinCopies(pin=pin, damaged=damaged))
        self._put(request).add_done_callback(lambda answer: answer.exception())

    def _unpin_answer(self, answer: asyncio.Future[Any]) -> None:
        if answer.exception() is None and isinstance(answer.result(), store_pb2.Pinned):
            self.unpin(answer.result().pin)

    async def find(self, wanted: store_pb2.WantedCopies) -> list[bytes]:
        """A Tier for each key, by group. Raises StoreUnavailable."""
        found: store_pb2.FoundCopies = await self.ask(find=wanted)
        if found.ask_others:
            found = await self._call_once("Find", wanted, TIMEOUT_S, is_lost=True)
        return list(found.tiers)

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

    def _put(self, request: store_pb2.StoreRequest) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((request, answer))
        if self._asking is None or self._asking.done():
            self._asking = self._loop.create_task(self._ask_all())
        return answer

    async def _ask_all(self) -> None:
        while self._waiting:
            some = [self._waiting.popleft() for _ in range(min(MAX_TOGETHER, len(self._waiting)))]
            try:
                answers = await self._ask_some([request for request, _ in some])
            except StoreUnavailable as error:
                self._fail(some, error)
            except BaseException:
                self._fail(some, StoreUnavailable(CLOSED))
                raise
            else:
                for (_, waiting), answer in zip(some, answers, strict=True):
                    waiting.set_result(answer)

    @staticmethod
    def _fail(some: Iterable[tuple[store_pb2.StoreRequest, asyncio.Future[Any]]], error: StoreUnavailable) -> None:
        for _, waiting in some:
            waiting.set_exception(error)

    async def _ask_some(self, requests: Sequence[store_pb2.StoreRequest]) -> list[Any]:
        call = self._call
        if call is None:
            raise StoreUnavailable("the node's KV store is not there")
        if len(requests) == 1:
            return [await self._exchange(call, requests[0])]
        together = store_pb2.StoreRequest(all=store_pb2.StoreRequests(requests=requests))
        answers: store_pb2.StoreResponses = await self._exchange(call, together)
        return [_answer_in(response) for response in answers.responses]

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
        return _answer_in(answer)

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


def _answer_in(response: Any) -> Any:
    return getattr(response, response.WhichOneof("response"))
