"""The target's part of a migration: what it needs of a session's KV comes from its node's store, or from the source."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import grpc

from holdfast import tls
from holdfast.errors import DeadlineExceeded, MigrationRefused
from holdfast.tokens import unpack_tokens
from holdfast.v1 import rank_pb2, worker_pb2, worker_pb2_grpc
from holdfast.wire import error_from_rpc
from workers.engine.leader import Leader
from workers.engine.migration import ExportedKV, PendingImport
from workers.engine.step_log import scope_of
from workers.kv.prefix import page_digests
from workers.serving.bandwidth import Bandwidth
from workers.serving.kv_transfer import pack_columns, unpack_columns
from workers.serving.page_copies import PageCopies
from workers.serving.page_fetch import fetch
from workers.serving.rank_links import RankLinks
from workers.serving.results import result_of


class Importer:
    """Imports sessions' KV into one worker. Refuses an import that is slower than recomputing the tokens."""

    def __init__(self, leader: Leader, links: RankLinks, copies: PageCopies | None = None) -> None:
        self._leader = leader
        self._links = links
        self._copies = copies
        self._bandwidth = Bandwidth(leader)

    async def import_session(self, request: worker_pb2.ImportRequest) -> worker_pb2.ImportResponse:
        """See ``WorkerService.Import``. Raises MigrationRefused, and the source's errors."""
        began = time.monotonic()
        transfer_id = uuid.uuid4().hex
        export = worker_pb2.ExportRequest(
            session_id=request.session_id, transfer_id=transfer_id, timeout_s=request.timeout_s
        )
        try:
            async with asyncio.timeout(request.timeout_s), tls.channel(request.source_address) as channel:
                call = worker_pb2_grpc.WorkerServiceStub(channel).Export(export, timeout=request.timeout_s)
                try:
                    with self._bandwidth.time.transfer() as charged_s:
                        answer = await self._import(call, request, transfer_id)
                        self._bandwidth.measured(answer.bytes, charged_s())
                finally:
                    call.cancel()  # ends the export
        except TimeoutError:
            raise DeadlineExceeded(f"the KV did not arrive within {request.timeout_s} s") from None
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        answer.seconds = time.monotonic() - began
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
        exported = ExportedKV(
            sent.tenant,
            scope_of(sent.scope).named_by(sent.tenant),
            unpack_tokens(sent.tokens),
            sent.committed_len,
            unpack_tokens(sent.turn_starts).tolist(),
            unpack_columns(sent.columns),
        )
        begun = migrations.begin_import(session_id, request.epoch, transfer_id, exported)
        try:
            pending = await result_of(begun)
            self._bandwidth.refuse_slow(pending)
            keys = await asyncio.to_thread(self._keys, exported.scope.name, pending)
            num_bytes = await self._fetch(session_id, pending, keys, list(sent.addresses), request.timeout_s)
            reached = await result_of(migrations.complete_import(session_id, transfer_id))
        except BaseException:
            migrations.cancel_import(session_id, transfer_id)
            raise
        return worker_pb2.ImportResponse(committed_len=reached, pages=pending.num_pages, bytes=num_bytes)

    def _keys(self, scope: str, pending: PendingImport) -> list[bytes]:
        """By group, the names of copies of the pages that are full."""
        if self._copies is None or not pending.num_pages:
            return []
        digests = page_digests(scope, pending.tokens[: pending.committed_len], self._leader.cache.page_size)
        return [b"".join(digests[column] for column in part if column < len(digests)) for part in pending.columns]

    async def _fetch(
        self, session_id: str, pending: PendingImport, keys: list[bytes], addresses: list[str], timeout_s: float
    ) -> int:
        """Have every rank read its pages, from its node's store or its counterpart, in parallel. Returns the bytes."""
        if not pending.num_pages:
            return 0
        requests = [
            rank_pb2.FetchRequest(
                session_id=session_id,
                transfer_id=pending.transfer_id,
                address=address,
                columns=pack_columns(pending.columns),
                keys=keys,
                timeout_s=timeout_s,
            )
            for address in addresses
        ]
        fetches = [self._links.fetch(rank, request) for rank, request in enumerate(requests) if rank]
        return sum(await asyncio.gather(fetch(self._leader, self._copies, requests[0]), *fetches))
