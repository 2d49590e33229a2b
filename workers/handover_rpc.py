"""Hand-over of KV between workers, over gRPC: the pages' server and reader, and the steps of an import."""

from __future__ import annotations

import asyncio
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc

from holdfast.errors import DeadlineExceeded, HandoverRefused, HoldfastError
from holdfast.tokens import pack_tokens, unpack_tokens
from holdfast.v1 import kv_pb2, kv_pb2_grpc, rank_pb2, worker_pb2, worker_pb2_grpc
from holdfast.wire import CHANNEL_OPTIONS, abort_with, error_from_rpc, sent_error
from workers.handover import Arriving, Held, read_pages, write_pages
from workers.leader import Leader
from workers.rank import Rank
from workers.rank_links import RankLinks

T = TypeVar("T")
CHUNK_BYTES = 512 * 1024
"""Read between two steps of the source, written between two of the target: a fraction of a millisecond."""
MAX_BREAKS = 3
"""A stream that breaks, or a page that comes wrong, is asked for again, from where it was, so often."""
BREAK_PAUSE_S = 0.1
WEIGHT_OF_LAST = 0.5
"""Of the last measurement, in the bandwidth that is expected."""
REMEASURE_EVERY = 16
"""Of the hand-overs that seem slower than computing, one in so many is made: the links may be faster by now."""


class RankThread(Protocol):
    """Whose thread owns a rank: its leader or its follower."""

    rank: Rank

    def call(self, act: Callable[[], T]) -> Future[T]:
        """``act()``, in that thread, between two steps."""


class KVServer(kv_pb2_grpc.KVServiceServicer):
    """One rank's pages, for its counterpart."""

    def __init__(self, owner: RankThread) -> None:
        self._owner = owner

    async def Read(self, request: kv_pb2.ReadRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[kv_pb2.Pages]:
        rank, at = self._owner.rank, request.first_page
        per_chunk = max(1, CHUNK_BYTES // rank.kv.page_bytes)
        try:
            while at < request.end_page:
                end = min(at + per_chunk, request.end_page)
                pages = await _done(self._owner.call(partial(read_pages, rank, request.transfer_id, at, end)))
                yield kv_pb2.Pages(first_page=at, data=b"".join(pages), crcs=[zlib.crc32(page) for page in pages])
                at = end
        except HoldfastError as error:
            await abort_with(context, error)


async def fetch_pages(owner: RankThread, request: rank_pb2.FetchRequest) -> int:
    """Read this rank's pages of a session from its counterpart into their places. Returns the bytes.

    Raises HandoverRefused, DeadlineExceeded, NoWorkerAvailable.
    """
    at, num_breaks = request.first_page, 0
    try:
        async with asyncio.timeout(request.timeout_s), _channel(request.address) as channel:
            stub = kv_pb2_grpc.KVServiceStub(channel)
            while at < request.end_page:
                wanted = kv_pb2.ReadRequest(transfer_id=request.transfer_id, first_page=at, end_page=request.end_page)
                call = stub.Read(wanted)
                try:
                    async for chunk in call:
                        pages = _pages_of(chunk, at, owner.rank.kv.page_bytes)
                        await _done(owner.call(partial(write_pages, owner.rank, request, at, pages)))
                        at += len(pages)
                except grpc.aio.AioRpcError as error:
                    if sent_error(error) is not None or num_breaks == MAX_BREAKS:
                        raise error_from_rpc(error) from None
                except _Damaged as damaged:
                    if num_breaks == MAX_BREAKS:
                        raise HandoverRefused(str(damaged)) from None
                finally:
                    call.cancel()
                if at < request.end_page:
                    num_breaks += 1
                    await asyncio.sleep(BREAK_PAUSE_S)
    except TimeoutError:
        raise DeadlineExceeded(f"{at - request.first_page} pages came within {request.timeout_s:.1f} s") from None
    return (request.end_page - request.first_page) * owner.rank.kv.page_bytes


class Importer:
    """Takes over sessions' KV for one worker. Remembers how fast that was, to choose what is cheaper."""

    def __init__(self, leader: Leader, links: RankLinks) -> None:
        self._leader = leader
        self._links = links
        self._bytes_per_s: float | None = None
        self._num_not_worth = 0

    async def take_over(self, request: worker_pb2.ImportRequest) -> worker_pb2.ImportResponse:
        """See ``WorkerService.Import``. Raises HandoverRefused, and what the source says."""
        began = time.monotonic()
        transfer_id = uuid.uuid4().hex
        export = worker_pb2.ExportRequest(
            session_id=request.session_id, transfer_id=transfer_id, timeout_s=request.timeout_s
        )
        try:
            async with asyncio.timeout(request.timeout_s), _channel(request.source_address) as channel:
                call = worker_pb2_grpc.WorkerServiceStub(channel).Export(export, timeout=request.timeout_s)
                try:
                    answer = await self._read_with(call, request, transfer_id)
                finally:
                    call.cancel()  # the source lets go
        except TimeoutError:
            raise DeadlineExceeded(f"the KV did not come within {request.timeout_s} s") from None
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        answer.seconds = time.monotonic() - began
        if answer.bytes and answer.seconds:
            speed = answer.bytes / answer.seconds
            before = self._bytes_per_s or speed
            self._bytes_per_s = WEIGHT_OF_LAST * speed + (1 - WEIGHT_OF_LAST) * before
        return answer

    async def _read_with(
        self, call: Any, request: worker_pb2.ImportRequest, transfer_id: str
    ) -> worker_pb2.ImportResponse:
        handovers, session_id = self._leader.handovers, request.session_id
        held = await call.read()
        if held is grpc.aio.EOF:
            raise HandoverRefused("the other worker closed the stream")
        if held.layout != self._leader.rank.layout:
            raise HandoverRefused(f"its pages are of {held.layout}, those here of {self._leader.rank.layout}")
        begun = handovers.begin(
            session_id,
            request.epoch,
            transfer_id,
            Held(held.tenant, unpack_tokens(held.tokens), held.committed_len),
        )
        try:
            arriving = await _done(begun)
            self._refuse_slow(arriving)
            num_bytes = await self._fetch(session_id, arriving, list(held.addresses), request.timeout_s)
            reached = await _done(handovers.complete(session_id, transfer_id))
        except BaseException:
            handovers.abandon(session_id, transfer_id)
            raise
        num_pages = arriving.end_page - arriving.first_page
        return worker_pb2.ImportResponse(committed_len=reached, pages=num_pages, bytes=num_bytes)

    def _refuse_slow(self, arriving: Arriving) -> None:
        speed, bandwidth = self._leader.prefill_tokens_per_s, self._bytes_per_s
        if not speed or not bandwidth:
            return
        rank = self._leader.rank
        num_bytes = (arriving.end_page - arriving.first_page) * rank.kv.page_bytes * rank.shard.size
        compute_s = (arriving.committed_len - arriving.cached_len) / speed
        if num_bytes / bandwidth > compute_s:
            self._num_not_worth += 1
            if self._num_not_worth % REMEASURE_EVERY:
                raise HandoverRefused(f"computing takes {compute_s:.3f} s, handing over {num_bytes / bandwidth:.3f} s")

    async def _fetch(self, session_id: str, arriving: Arriving, addresses: list[str], timeout_s: float) -> int:
        """All ranks' pages, each rank from its counterpart at the same time. Returns the bytes."""
        if arriving.first_page == arriving.end_page:
            return 0
        requests = [
            rank_pb2.FetchRequest(
                session_id=session_id,
                transfer_id=arriving.transfer_id,
                address=address,
                first_page=arriving.first_page,
                end_page=arriving.end_page,
                timeout_s=timeout_s,
            )
            for address in addresses
        ]
        fetches = [self._links.fetch(rank, asked) for rank, asked in enumerate(requests) if rank]
        return sum(await asyncio.gather(fetch_pages(self._leader, requests[0]), *fetches))


async def hold_for_reader(
    leader: Leader, request: worker_pb2.ExportRequest, addresses: list[str]
) -> AsyncIterator[worker_pb2.ExportResponse]:
    """See ``WorkerService.Export``: one answer, and the pages are held until the iterator is closed."""
    try:
        held = await _done(leader.handovers.hold(request.session_id, request.transfer_id))
        yield worker_pb2.ExportResponse(
            tenant=held.tenant,
            tokens=pack_tokens(held.tokens),
            committed_len=held.committed_len,
            layout=leader.rank.layout,
            addresses=addresses,
        )
        await asyncio.sleep(request.timeout_s)  # by then the reader has given up
    finally:
        leader.handovers.let_go(request.transfer_id)


class _Damaged(Exception):
    """A page is not what was sent."""


def _pages_of(chunk: kv_pb2.Pages, expected_first: int, page_bytes: int) -> list[bytes]:
    if chunk.first_page != expected_first or len(chunk.data) != page_bytes * len(chunk.crcs):
        raise _Damaged(f"page {chunk.first_page} came, {len(chunk.data)} bytes, where {expected_first} was due")
    pages = [chunk.data[i * page_bytes : (i + 1) * page_bytes] for i in range(len(chunk.crcs))]
    for i, (page, crc) in enumerate(zip(pages, chunk.crcs, strict=True)):
        if zlib.crc32(page) != crc:
            raise _Damaged(f"page {expected_first + i} has another checksum than was sent with it")
    return pages


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


async def _done(future: Future[T]) -> T:
    return await asyncio.shield(asyncio.wrap_future(future))
