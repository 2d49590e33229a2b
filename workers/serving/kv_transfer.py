"""Transfer of KV pages between workers over gRPC: the page server, the reader, and the steps of an import."""

from __future__ import annotations

import asyncio
import time
import uuid
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc

from holdfast.errors import DeadlineExceeded, HoldfastError, MigrationRefused
from holdfast.tokens import pack_tokens, unpack_tokens
from holdfast.v1 import kv_pb2, kv_pb2_grpc, rank_pb2, worker_pb2, worker_pb2_grpc
from holdfast.wire import CHANNEL_OPTIONS, abort_with, error_from_rpc, sent_error
from workers.engine.leader import Leader
from workers.engine.migration import ExportedKV, PendingImport, read_pages, write_pages
from workers.engine.rank import Rank
from workers.serving.rank_links import RankLinks
from workers.serving.results import result_of

T = TypeVar("T")
CHUNK_BYTES = 512 * 1024
"""Read between two steps of the source, written between two steps of the target: a fraction of a millisecond."""
MAX_RETRIES = 3
"""Retries after a broken stream or a damaged page, each from the first page that is missing."""
RETRY_PAUSE_S = 0.1
WEIGHT_OF_LAST = 0.5
"""Weight of the last measurement in the expected bandwidth."""
REMEASURE_EVERY = 16
"""One in this many imports that look slower than recomputing is made anyway, to measure the links again."""


class RankThread(Protocol):
    """The thread that owns a rank: a leader's or a follower's."""

    rank: Rank

    def call(self, act: Callable[[], T]) -> Future[T]:
        """Run ``act`` in that thread, between two steps."""


class KVServer(kv_pb2_grpc.KVServiceServicer):
    """Serves one rank's exported pages to its counterpart in another worker."""

    def __init__(self, owner: RankThread) -> None:
        self._owner = owner

    async def Read(self, request: kv_pb2.ReadRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[kv_pb2.Pages]:
        rank, at = self._owner.rank, request.first_page
        per_chunk = max(1, CHUNK_BYTES // rank.kv.page_bytes)
        try:
            while at < request.end_page:
                end = min(at + per_chunk, request.end_page)
                pages = await result_of(self._owner.call(partial(read_pages, rank, request.transfer_id, at, end)))
                yield kv_pb2.Pages(first_page=at, data=b"".join(pages), crcs=[zlib.crc32(page) for page in pages])
                at = end
        except HoldfastError as error:
            await abort_with(context, error)


async def fetch_pages(owner: RankThread, request: rank_pb2.FetchRequest) -> int:
    """Read this rank's pages of a session from its counterpart. Returns the bytes read.

    Raises MigrationRefused, DeadlineExceeded, NoWorkerAvailable.
    """
    at, num_retries = request.first_page, 0
    try:
        async with asyncio.timeout(request.timeout_s), _channel(request.address) as channel:
            stub = kv_pb2_grpc.KVServiceStub(channel)
            while at < request.end_page:
                wanted = kv_pb2.ReadRequest(transfer_id=request.transfer_id, first_page=at, end_page=request.end_page)
                call = stub.Read(wanted)
                try:
                    async for chunk in call:
                        pages = _pages_of(chunk, at, owner.rank.kv.page_bytes)
                        await result_of(owner.call(partial(write_pages, owner.rank, request, at, pages)))
                        at += len(pages)
                except grpc.aio.AioRpcError as error:
                    if sent_error(error) is not None or num_retries == MAX_RETRIES:
                        raise error_from_rpc(error) from None
                except _DamagedPages as damaged:
                    if num_retries == MAX_RETRIES:
                        raise MigrationRefused(str(damaged)) from None
                finally:
                    call.cancel()
                if at < request.end_page:
                    num_retries += 1
                    await asyncio.sleep(RETRY_PAUSE_S)
    except TimeoutError:
        raise DeadlineExceeded(f"{at - request.first_page} pages arrived within {request.timeout_s:.1f} s") from None
    return (request.end_page - request.first_page) * owner.rank.kv.page_bytes


class Importer:
    """Imports sessions' KV into one worker. Refuses an import that is slower than recomputing the tokens."""

    def __init__(self, leader: Leader, links: RankLinks) -> None:
        self._leader = leader
        self._links = links
        self._bytes_per_s: float | None = None
        self._num_refused = 0

    async def import_session(self, request: worker_pb2.ImportRequest) -> worker_pb2.ImportResponse:
        """See ``WorkerService.Import``. Raises MigrationRefused, and the source's errors."""
        began = time.monotonic()
        transfer_id = uuid.uuid4().hex
        export = worker_pb2.ExportRequest(
            session_id=request.session_id, transfer_id=transfer_id, timeout_s=request.timeout_s
        )
        try:
            async with asyncio.timeout(request.timeout_s), _channel(request.source_address) as channel:
                call = worker_pb2_grpc.WorkerServiceStub(channel).Export(export, timeout=request.timeout_s)
                try:
                    answer = await self._import(call, request, transfer_id)
                finally:
                    call.cancel()  # ends the export
        except TimeoutError:
            raise DeadlineExceeded(f"the KV did not arrive within {request.timeout_s} s") from None
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        answer.seconds = time.monotonic() - began
        if answer.bytes and answer.seconds:
            speed = answer.bytes / answer.seconds
            before = self._bytes_per_s or speed
            self._bytes_per_s = WEIGHT_OF_LAST * speed + (1 - WEIGHT_OF_LAST) * before
        return answer

    async def _import(
        self, call: Any, request: worker_pb2.ImportRequest, transfer_id: str
    ) -> worker_pb2.ImportResponse:
        migrations, session_id = self._leader.migrations, request.session_id
        sent = await call.read()
        if sent is grpc.aio.EOF:
            raise MigrationRefused("the source closed the stream")
        if sent.layout != self._leader.rank.layout:
            raise MigrationRefused(f"the source's pages have layout {sent.layout}, not {self._leader.rank.layout}")
        exported = ExportedKV(sent.tenant, unpack_tokens(sent.tokens), sent.committed_len)
        begun = migrations.begin_import(session_id, request.epoch, transfer_id, exported)
        try:
            pending = await result_of(begun)
            self._refuse_slow(pending)
            num_bytes = await self._fetch(session_id, pending, list(sent.addresses), request.timeout_s)
            reached = await result_of(migrations.complete_import(session_id, transfer_id))
        except BaseException:
            migrations.cancel_import(session_id, transfer_id)
            raise
        num_pages = pending.end_page - pending.first_page
        return worker_pb2.ImportResponse(committed_len=reached, pages=num_pages, bytes=num_bytes)

    def _refuse_slow(self, pending: PendingImport) -> None:
        speed, bandwidth = self._leader.prefill_tokens_per_s, self._bytes_per_s
        if not speed or not bandwidth:
            return
        rank = self._leader.rank
        num_bytes = (pending.end_page - pending.first_page) * rank.kv.page_bytes * rank.shard.size
        compute_s = (pending.committed_len - pending.cached_len) / speed
        if num_bytes / bandwidth > compute_s:
            self._num_refused += 1
            if self._num_refused % REMEASURE_EVERY:
                raise MigrationRefused(f"computing takes {compute_s:.3f} s, a transfer {num_bytes / bandwidth:.3f} s")

    async def _fetch(self, session_id: str, pending: PendingImport, addresses: list[str], timeout_s: float) -> int:
        """Have every rank read its pages from its counterpart, in parallel. Returns the bytes read."""
        if pending.first_page == pending.end_page:
            return 0
        requests = [
            rank_pb2.FetchRequest(
                session_id=session_id,
                transfer_id=pending.transfer_id,
                address=address,
                first_page=pending.first_page,
                end_page=pending.end_page,
                timeout_s=timeout_s,
            )
            for address in addresses
        ]
        fetches = [self._links.fetch(rank, request) for rank, request in enumerate(requests) if rank]
        return sum(await asyncio.gather(fetch_pages(self._leader, requests[0]), *fetches))


async def export_session(
    leader: Leader, request: worker_pb2.ExportRequest, addresses: list[str]
) -> AsyncGenerator[worker_pb2.ExportResponse, None]:
    """See ``WorkerService.Export``: yields one response, and holds the pages until the iterator is closed."""
    try:
        exported = await result_of(leader.migrations.export(request.session_id, request.transfer_id))
        yield worker_pb2.ExportResponse(
            tenant=exported.tenant,
            tokens=pack_tokens(exported.tokens),
            committed_len=exported.committed_len,
            layout=leader.rank.layout,
            addresses=addresses,
        )
        await asyncio.sleep(request.timeout_s)  # the reader has given up by then
    finally:
        leader.migrations.end_export(request.transfer_id)


class _DamagedPages(Exception):
    """Received pages differ from those that were sent."""


def _pages_of(chunk: kv_pb2.Pages, expected_first: int, page_bytes: int) -> list[bytes]:
    if chunk.first_page != expected_first or len(chunk.data) != page_bytes * len(chunk.crcs):
        raise _DamagedPages(
            f"received page {chunk.first_page} in {len(chunk.data)} bytes, expected page {expected_first}"
        )
    pages = [chunk.data[i * page_bytes : (i + 1) * page_bytes] for i in range(len(chunk.crcs))]
    for i, (page, crc) in enumerate(zip(pages, chunk.crcs, strict=True)):
        if zlib.crc32(page) != crc:
            raise _DamagedPages(f"page {expected_first + i} does not match its checksum")
    return pages


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
