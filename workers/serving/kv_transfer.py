"""Transfer of KV pages between workers over gRPC: the page server, the reader, and the steps of an import."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

import grpc
from zlib_ng.zlib_ng import crc32

from holdfast import tls
from holdfast.errors import DeadlineExceeded, HoldfastError, MigrationRefused
from holdfast.tokens import pack_tokens, unpack_tokens
from holdfast.v1 import kv_pb2, kv_pb2_grpc, rank_pb2, worker_pb2
from holdfast.wire import abort_with, error_from_rpc, sent_error
from workers.engine.leader import Leader
from workers.engine.migration import Columns, read_pages, write_pages
from workers.engine.rank import Rank
from workers.engine.step_log import scope_message
from workers.serving.results import result_of

T = TypeVar("T")
CHUNK_BYTES = 512 * 1024
"""Read between two steps of the source, written between two steps of the target: a fraction of a millisecond."""
MAX_RETRIES = 3
"""Retries after a broken stream or a damaged page, each from the first page that is missing."""
RETRY_PAUSE_S = 0.1


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
        rank = self._owner.rank
        try:
            for group, columns in enumerate(unpack_columns(request.columns)):
                per_chunk = max(1, CHUNK_BYTES // rank.kv.page_bytes[group])
                for first in range(0, len(columns), per_chunk):
                    part = columns[first : first + per_chunk]
                    pages = await result_of(
                        self._owner.call(partial(read_pages, rank, request.transfer_id, group, part))
                    )
                    yield kv_pb2.Pages(
                        group=group,
                        columns=pack_tokens(array("i", part)),
                        data=b"".join(pages),
                        crcs=[crc32(page) for page in pages],
                    )
        except HoldfastError as error:
            await abort_with(context, error)


async def fetch_pages(owner: RankThread, request: rank_pb2.FetchRequest, missing: Columns) -> int:
    """Read this rank's pages of a session from its counterpart. Returns the bytes read.

    Raises MigrationRefused, DeadlineExceeded, NoWorkerAvailable.
    """
    num_retries, num_bytes = 0, 0
    try:
        async with asyncio.timeout(request.timeout_s), tls.channel(request.address) as channel:
            stub = kv_pb2_grpc.KVServiceStub(channel)
            while any(missing):
                call = stub.Read(kv_pb2.ReadRequest(transfer_id=request.transfer_id, columns=pack_columns(missing)))
                try:
                    async for chunk in call:
                        columns = _checked(chunk, missing, owner.rank.kv.page_bytes)
                        write = partial(write_pages, owner.rank, request, chunk.group, columns, chunk.data)
                        await result_of(owner.call(write))
                        del missing[chunk.group][: len(columns)]
                        num_bytes += len(chunk.data)
                except grpc.aio.AioRpcError as error:
                    if sent_error(error) is not None or num_retries == MAX_RETRIES:
                        raise error_from_rpc(error) from None
                except _DamagedPages as damaged:
                    if num_retries == MAX_RETRIES:
                        raise MigrationRefused(str(damaged)) from None
                finally:
                    call.cancel()
                if any(missing):
                    num_retries += 1
                    await asyncio.sleep(RETRY_PAUSE_S)
    except TimeoutError:
        raise DeadlineExceeded(f"{num_bytes} bytes of KV arrived within {request.timeout_s:.1f} s") from None
    return num_bytes


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
            columns=pack_columns(exported.columns),
            turn_starts=pack_tokens(array("i", exported.turn_starts)),
            scope=scope_message(exported.scope),
        )
        await asyncio.sleep(request.timeout_s)  # the reader has given up by then
    finally:
        leader.migrations.end_export(request.transfer_id)


class _DamagedPages(Exception):
    """Received pages differ from those that were sent."""


def _checked(chunk: kv_pb2.Pages, missing: Columns, page_bytes: Sequence[int]) -> list[int]:
    """The columns of the chunk's pages, which are as they were sent."""
    columns = unpack_tokens(chunk.columns).tolist()
    group, size = chunk.group, page_bytes[chunk.group] if chunk.group < len(page_bytes) else 0
    if not columns or not size or columns != missing[group][: len(columns)]:
        raise _DamagedPages(f"received pages {columns} of group {group}, which were not asked for")
    if len(chunk.crcs) != len(columns) or len(chunk.data) != size * len(columns):
        raise _DamagedPages(f"received {len(columns)} pages of group {group} in {len(chunk.data)} bytes")
    data = memoryview(chunk.data)
    for i, (column, crc) in enumerate(zip(columns, chunk.crcs, strict=True)):
        if crc32(data[i * size : (i + 1) * size]) != crc:
            raise _DamagedPages(f"page {column} of group {group} does not match its checksum")
    return columns


def pack_columns(columns: Columns) -> list[bytes]:
    """As they are sent."""
    return [pack_tokens(array("i", part)) for part in columns]


def unpack_columns(columns: Sequence[bytes]) -> Columns:
    """``pack_columns`` undone."""
    return [unpack_tokens(part).tolist() for part in columns]
