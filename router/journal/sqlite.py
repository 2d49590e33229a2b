"""The journal in one SQLite file in WAL mode, for routers on one machine.

Writes are group-committed: those that arrive while a transaction commits form the next one.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import HoldfastError, JournalUnavailable
from router.journal.interface import (
    BEATS_PER_LEASE,
    MAX_SESSIONS_PER_TENANT,
    ROUTER_LEASE_S,
    TOMBSTONE_RETENTION_S,
    Fence,
    Owner,
    SessionRecord,
    TurnRecord,
    check_durability,
)
from router.journal.sqlite_file import open_file
from router.journal.sqlite_store import SqliteStore

T = TypeVar("T")
MAX_GROUP = 512
"""Writes in one transaction. Limits how long the first of them waits for the last."""


class SqliteJournal:
    """See ``Journal``. One thread owns the database; the methods queue their statements to it."""

    def __init__(
        self,
        path: Path,
        durability: str,
        lease_s: float = ROUTER_LEASE_S,
        max_sessions: Callable[[str], int] = lambda tenant: MAX_SESSIONS_PER_TENANT,
        tombstone_retention_s: float = TOMBSTONE_RETENTION_S,
    ) -> None:
        check_durability(durability)
        self._lease_s = lease_s
        self._beats: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]] | None]
        self._queue = queue.SimpleQueue()
        self.num_commits = 0
        self.num_writes = 0
        self._db = open_file(path, {"process": "NORMAL", "power": "FULL"}[durability])
        self._store = SqliteStore(
            self._db,
            uuid.uuid4().hex,
            lease_s=lease_s,
            max_sessions=max_sessions,
            retention_s=tombstone_retention_s,
        )
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="holdfast-journal", daemon=True)
        self._thread.start()

    async def start(self) -> None:
        await self._call(self._store.renew_lease)
        self._beats = asyncio.create_task(self._keep_lease())

    async def close(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
            await asyncio.gather(self._call(self._store.drop_lease), return_exceptions=True)
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._db.close()

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)
            await asyncio.gather(self._call(self._store.renew_lease), return_exceptions=True)  # turns report the error

    # ---- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            first = self._queue.get()
            group = [first]
            while len(group) < MAX_GROUP and not self._queue.empty():
                group.append(self._queue.get())
            calls = [item for item in group if item is not None]
            if calls:
                self._commit(calls)
            if None in group:
                return

    def _commit(self, calls: list[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]]]) -> None:
        answers: list[tuple[asyncio.Future[Any], Any]] = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for function, args, future in calls:
                # Statements check before they write: a refusal changes nothing.
                try:
                    answers.append((future, function(*args)))
                except HoldfastError as error:
                    answers.append((future, error))
            self._db.execute("COMMIT")
            self.num_commits += 1
            self.num_writes += len(calls)
        except Exception as error:  # of any kind: if this thread ended, every turn would wait forever
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if len(calls) > 1:
                # One bad write must not fail the others in its group.
                for call in calls:
                    self._commit([call])
                return
            failure = JournalUnavailable(f"the journal cannot be written: {error}")
            answers = [(future, failure) for _, _, future in calls]
        self._loop.call_soon_threadsafe(resolve, answers)

    def _call(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        if self._closed:  # nobody would answer
            future.set_exception(JournalUnavailable("the journal is closed"))
            return future
        self._queue.put((function, args, future))
        return future

    # ---- the interface ----------------------------------------------------------------------------

    async def take(self, session_id: str, tenant: str, *, create: bool) -> SessionRecord:
        return await self._call(self._store.take, session_id, tenant, create)

    async def load(self, session_id: str, tenant: str) -> SessionRecord:
        return await self._call(self._store.load, session_id, tenant)

    async def pin(self, session_id: str, epoch: int, worker: str) -> int:
        return await self._call(self._store.pin, session_id, epoch, worker)

    async def move(self, session_id: str, epoch: int, worker: str) -> int:
        return await self._call(self._store.move, session_id, epoch, worker)

    async def begin_turn(
        self, session_id: str, epoch: int, turn_id: str, keep_len: int, ids: array[int], request: bytes
    ) -> None:
        await self._call(self._store.begin_turn, session_id, epoch, turn_id, keep_len, ids, request)

    async def adopt_turn(self, session_id: str, tenant: str, turn_id: str) -> TurnRecord:
        return await self._call(self._store.adopt_turn, session_id, tenant, turn_id)

    async def append(self, session_id: str, epoch: int, turn_id: str, start: int, ids: list[int]) -> None:
        await self._call(self._store.append, session_id, epoch, turn_id, start, ids)

    async def complete_turn(self, session_id: str, epoch: int, turn_id: str, finish: str) -> None:
        await self._call(self._store.complete_turn, session_id, epoch, turn_id, finish)

    async def abort_turn(self, session_id: str, turn_id: str) -> bool:
        return await self._call(self._store.abort_turn, session_id, turn_id)

    async def leave_turn(self, session_id: str, turn_id: str) -> None:
        await self._call(self._store.leave_turn, session_id, turn_id)

    async def cut(self, session_id: str, epoch: int, keep_len: int) -> None:
        await self._call(self._store.cut, session_id, epoch, keep_len)

    async def fork(self, parent_id: str, tenant: str, child_id: str, at_len: int | None) -> SessionRecord:
        return await self._call(self._store.fork, parent_id, tenant, child_id, at_len)

    async def release(self, session_id: str, tenant: str) -> SessionRecord:
        return await self._call(self._store.release, session_id, tenant)

    async def owners(self, session_ids: list[str]) -> dict[str, Owner]:
        return await self._call(self._store.owners, session_ids)

    async def put_objects(self, tenant: str, objects: dict[str, bytes], fence: Fence | None = None) -> None:
        await self._call(self._store.put_objects, tenant, objects, fence)

    async def get_object(self, tenant: str, key: str) -> bytes | None:
        return await self._call(self._store.get_object, tenant, key)

    async def list_objects(self, tenant: str, prefix: str) -> list[tuple[str, bytes]]:
        return await self._call(self._store.list_objects, tenant, prefix)

    async def delete_objects(self, tenant: str, keys: list[str]) -> None:
        await self._call(self._store.delete_objects, tenant, keys)

    async def list_sessions(self, tenant: str) -> list[tuple[SessionRecord, int, bool]]:
        return await self._call(self._store.list_sessions, tenant)


def resolve(answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
    """Set results and exceptions on futures whose callers still wait."""
    for future, value in answers:
        if future.done():
            continue
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)
