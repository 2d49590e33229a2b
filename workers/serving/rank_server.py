"""A follower's gRPC server: it applies the step log from one leader, and ends with that leader's stream."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable

import grpc

from holdfast import tls
from holdfast.deadlines import within
from holdfast.errors import RankDiverged, StaleEpoch
from holdfast.silence import silent_for
from holdfast.v1 import kv_pb2_grpc, rank_pb2, rank_pb2_grpc
from holdfast.wire import abort_with, sends_errors
from workers.config import EngineConfig
from workers.engine.collectives import Collectives
from workers.engine.follower import Follower
from workers.engine.rank import Rank
from workers.serving.kv_transfer import KVServer
from workers.serving.page_copies import PageCopies
from workers.serving.page_fetch import fetch

log = logging.getLogger("holdfast.rank")


class RankServer(rank_pb2_grpc.RankServiceServicer):
    """One follower's server. ``on_lost`` is called once with a reason, from any thread, when it must end."""

    def __init__(
        self,
        worker_id: str,
        incarnation: int,
        config: EngineConfig,
        group: Collectives,
        node: str,
        on_lost: Callable[[str], None],
    ) -> None:
        self._config = config
        self._group = group
        self.name = f"rank {group.shard.rank} of {worker_id}@{incarnation}"
        self.incarnation = incarnation
        self._lease_s = config.rank_lease_s
        self.follower: Follower
        self._node = node
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[rank_pb2.RankMessage] = asyncio.Queue()
        self._followed = False
        self._copies: PageCopies | None = None
        self._stopping = False
        self._num_heard = 0

    @property
    def rank(self) -> Rank:
        """After ``start``."""
        return self.follower.rank

    async def start(self, host: str) -> str:
        """Load this rank's shard and serve on a free port of ``host``; returns the address."""
        self.follower = await asyncio.to_thread(
            Follower, self._config, self._group, self.incarnation, self._send_ack, self._refuse
        )
        if self._config.kv_store is not None:
            self._copies = PageCopies(self.follower, self._config)
        server = tls.server()
        rank_pb2_grpc.add_RankServiceServicer_to_server(self, server)
        kv_pb2_grpc.add_KVServiceServicer_to_server(KVServer(self.follower), server)
        port = tls.listen(server, f"{host}:0")
        self.follower.start()
        await server.start()
        self._server = server
        return f"{host}:{port}"

    def expect_end(self) -> None:
        """The leader is about to stop: do not treat that as a failure."""
        self._stopping = True

    async def stop(self) -> None:
        self._stopping = True
        await self._server.stop(grace=0.2)
        if self._copies is not None:
            await self._copies.stop()
        await asyncio.to_thread(self.follower.stop)

    async def Follow(
        self, requests: AsyncIterator[rank_pb2.LeaderMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[rank_pb2.RankMessage]:
        if self._followed:
            await abort_with(context, StaleEpoch(f"{self.name} has a leader already"))
        self._followed = True
        reader = asyncio.create_task(self._read(requests))
        silence = asyncio.create_task(self._watch())
        try:
            yield rank_pb2.RankMessage(hello=self._hello())
            while not reader.done():
                try:
                    message = await within(self._lease_s / 8, self._outbox.get())
                except TimeoutError:
                    message = rank_pb2.RankMessage(beat=rank_pb2.Beat())
                yield message
                if message.HasField("refusal"):
                    break
        finally:
            reader.cancel()
            silence.cancel()
            self._lose("the stream from the leader broke")

    @sends_errors
    async def Fetch(self, request: rank_pb2.FetchRequest, context: grpc.aio.ServicerContext) -> rank_pb2.FetchResponse:
        return rank_pb2.FetchResponse(bytes=await fetch(self.follower, self._copies, request))

    async def _read(self, requests: AsyncIterator[rank_pb2.LeaderMessage]) -> None:
        async for message in requests:
            self._num_heard += 1
            if message.HasField("entry"):
                self.follower.push(message.entry)
        self._lose("the leader closed the stream")

    async def _watch(self) -> None:
        await silent_for(self._lease_s, lambda: self._num_heard)
        self._lose(f"the leader was silent for {self._lease_s} s")

    def _lose(self, reason: str) -> None:
        if not self._stopping:
            self._on_lost(f"{self.name}: {reason}")

    def _hello(self) -> rank_pb2.RankHello:
        return rank_pb2.RankHello(
            rank=self.follower.rank.shard.rank,
            incarnation=self.incarnation,
            pid=os.getpid(),
            node=self._node,
            digest=self.follower.rank.cache.digest(),
        )

    def _send_ack(self, ack: rank_pb2.Ack) -> None:
        self._put(rank_pb2.RankMessage(ack=ack))

    def _refuse(self, error: BaseException) -> None:
        """Called in the follower's thread. Sends the leader the reason before the stream breaks."""
        index = self.follower.reader.last_index + 1
        text = error.message if isinstance(error, RankDiverged) else repr(error)
        log.critical("%s stops at entry %d: %s", self.name, index, text)
        self._put(rank_pb2.RankMessage(refusal=rank_pb2.Refusal(index=index, message=text)))

    def _put(self, message: rank_pb2.RankMessage) -> None:
        self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)
