"""The leader's links to the other ranks of its worker: one gRPC stream each."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc

from holdfast import tls
from holdfast.deadlines import within
from holdfast.errors import RankDiverged
from holdfast.silence import silent_for
from holdfast.v1 import rank_pb2, rank_pb2_grpc, worker_pb2
from holdfast.wire import error_from_rpc
from workers.engine.step_log import LogWriter

log = logging.getLogger("holdfast.rank")


class RankLinks:
    """Streams to all followers, by rank. ``on_lost`` is called with a reason when the group must end."""

    def __init__(self, lease_s: float, on_lost: Callable[[str], None]) -> None:
        self._lease_s = lease_s
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[int, asyncio.Queue[rank_pb2.LeaderMessage]] = {}
        self._entries: queue.SimpleQueue[rank_pb2.Entry | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._forward, name="holdfast-rank-links", daemon=True)
        self._channels: dict[int, grpc.aio.Channel] = {}
        self.addresses: list[str] = []
        """The followers' addresses, by rank."""
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._num_heard: Counter[int] = Counter()
        self.hellos: dict[int, rank_pb2.RankHello] = {}

    async def connect(self, addresses: dict[int, str], writer: LogWriter, digest: int, timeout_s: float) -> None:
        """Open the streams; returns when every rank has sent its hello.

        ``digest``: of the leader's empty state. Raises RankDiverged for a rank that is configured
        differently, TimeoutError if one does not answer.
        """
        self.addresses = [address for _, address in sorted(addresses.items())]
        async with asyncio.timeout(timeout_s):
            calls = {rank: await self._open(rank, address) for rank, address in addresses.items()}
        for rank, hello in self.hellos.items():
            if (hello.rank, hello.incarnation, hello.digest) != (rank, writer.incarnation, digest):
                raise RankDiverged(f"rank {rank} is not configured like its leader: {hello}")
        for rank, call in calls.items():
            self._outboxes[rank] = asyncio.Queue()
            self._tasks.append(asyncio.create_task(self._read(rank, call, writer)))
            self._tasks.append(asyncio.create_task(self._watch(rank)))
            self._tasks.append(asyncio.create_task(self._write(rank, call)))
        self._thread.start()

    def send(self, entry: rank_pb2.Entry) -> None:
        """Called in the leader's thread; returns at once."""
        self._entries.put(entry)

    async def fetch(self, rank: int, request: rank_pb2.FetchRequest) -> int:
        """Have a follower read its pages of a session. Returns the bytes. Raises as ``fetch_pages``."""
        try:
            answer: rank_pb2.FetchResponse = await rank_pb2_grpc.RankServiceStub(self._channels[rank]).Fetch(
                request, timeout=request.timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        return answer.bytes

    def expect_end(self) -> None:
        self._stopping = True

    async def stop(self) -> None:
        """End the streams. Followers that were not stopped before end too."""
        self._stopping = True
        if self._thread.is_alive():
            self._entries.put(None)
            await asyncio.to_thread(self._thread.join)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()

    def stats(self, writer: LogWriter) -> list[worker_pb2.RankStats]:
        """Each follower's process and position in the step log."""
        last = writer.last_index
        return [
            worker_pb2.RankStats(
                rank=rank, pid=hello.pid, node=hello.node, log_index=writer.acked[rank], lag=last - writer.acked[rank]
            )
            for rank, hello in sorted(self.hellos.items())
        ]

    # ---- inside -----------------------------------------------------------------------------------

    async def _open(self, rank: int, address: str) -> Any:
        channel = tls.channel(address)
        self._channels[rank] = channel
        call = rank_pb2_grpc.RankServiceStub(channel).Follow(wait_for_ready=True)
        message = await call.read()
        if message is grpc.aio.EOF:
            raise RankDiverged(f"rank {rank} at {address} refuses a leader")
        self.hellos[rank] = message.hello
        return call

    def _forward(self) -> None:
        """Pass entries to the event loop. In a thread of its own, because waking the loop costs the caller the
        GIL: the leader would have to wait for it, while this thread takes it when the leader computes."""
        while (entry := self._entries.get()) is not None:
            self._loop.call_soon_threadsafe(self._enqueue, rank_pb2.LeaderMessage(entry=entry))

    def _enqueue(self, message: rank_pb2.LeaderMessage) -> None:
        for outbox in self._outboxes.values():
            outbox.put_nowait(message)

    async def _write(self, rank: int, call: Any) -> None:
        outbox = self._outboxes[rank]
        while True:
            try:
                message = await within(self._lease_s / 8, outbox.get())
            except TimeoutError:
                message = rank_pb2.LeaderMessage(beat=rank_pb2.Beat())
            try:
                await call.write(message)
            except grpc.aio.AioRpcError:
                return  # the reader reports the reason
            except asyncio.InvalidStateError:
                return

    async def _watch(self, rank: int) -> None:
        await silent_for(self._lease_s, lambda: self._num_heard[rank])
        self._lose(f"rank {rank} was silent for {self._lease_s} s")

    async def _read(self, rank: int, call: Any, writer: LogWriter) -> None:
        try:
            while True:
                message = await call.read()
                if message is grpc.aio.EOF:
                    raise RankDiverged("closed the stream")
                self._num_heard[rank] += 1
                kind = message.WhichOneof("message")
                if kind == "ack":
                    writer.ack(rank, message.ack)
                elif kind == "refusal":
                    raise RankDiverged(f"refuses entry {message.refusal.index}: {message.refusal.message}")
        except RankDiverged as error:
            self._lose(f"rank {rank}: {error.message}")
        except grpc.aio.AioRpcError as error:
            self._lose(f"rank {rank} is gone: {error.code().name} {error.details()}")
        except Exception as error:
            # Without this task no ack is read, and every token would wait forever.
            self._lose(f"rank {rank} cannot be read: {error!r}")

    def _lose(self, reason: str) -> None:
        if not self._stopping:
            self._on_lost(reason)
