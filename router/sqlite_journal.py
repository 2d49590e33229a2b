"""The journal in one SQLite file in WAL mode: for routers of one machine.

Writes are group-committed: what arrives while one transaction is being committed goes into the next.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import uuid
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import (
    ConfigError,
    HoldfastError,
    InvalidRequest,
    JournalUnavailable,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    SessionReleased,
    StaleEpoch,
    TooManySessions,
    TurnNotFound,
)
from router.journal import (
    BEATS_PER_LEASE,
    MAX_SESSIONS_PER_TENANT,
    ROUTER_LEASE_S,
    TOMBSTONE_RETENTION_S,
    SessionRecord,
    TurnRecord,
)
from router.sqlite_file import open_file

T = TypeVar("T")
MAX_GROUP = 512
"""Writes in one transaction: bounds how long the first of them waits for the last."""


class SqliteJournal:
    """See ``Journal``. One thread owns the database. ``process``: survives kill -9; ``power``: fsync first."""

    def __init__(
        self,
        path: Path,
        durability: str,
        lease_s: float = ROUTER_LEASE_S,
        max_sessions: int = MAX_SESSIONS_PER_TENANT,
        tombstone_retention_s: float = TOMBSTONE_RETENTION_S,
    ) -> None:
        if durability not in ("process", "power"):
            raise ConfigError(f"journal_durability: {durability!r} is not one of process, power")
        self.router = uuid.uuid4().hex
        self._lease_s = lease_s
        self._max_sessions = max_sessions
        self._retention_s = tombstone_retention_s
        self._beats: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]] | None]
        self._queue = queue.SimpleQueue()
        self.num_commits = 0
        self.num_writes = 0
        self._db = open_file(path, {"process": "NORMAL", "power": "FULL"}[durability])
        self._thread = threading.Thread(target=self._run, name="holdfast-journal", daemon=True)
        self._thread.start()

    async def start(self) -> None:
        await self._call(self._beat)
        self._beats = asyncio.create_task(self._keep_lease())

    async def close(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
            await asyncio.gather(self._call(self._leave), return_exceptions=True)
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._db.close()

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)
            await asyncio.gather(self._call(self._beat), return_exceptions=True)  # the turns say what is wrong

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
                # Each checks before it writes, so that a refused one leaves nothing behind.
                try:
                    answers.append((future, function(*args)))
                except HoldfastError as error:
                    answers.append((future, error))
            self._db.execute("COMMIT")
            self.num_commits += 1
            self.num_writes += len(calls)
        except Exception as error:  # whatever it is: a thread that ended would leave every turn waiting
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if len(calls) > 1:
                # One bad write must not fail those that only came at the same time.
                for call in calls:
                    self._commit([call])
                return
            failure = JournalUnavailable(f"the journal cannot be written: {error}")
            answers = [(future, failure) for _, _, future in calls]
        self._loop.call_soon_threadsafe(_answer, answers)

    def _call(self, function: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((function, args, future))
        return future

    # ---- the interface ----------------------------------------------------------------------------

    async def take(self, session_id: str, tenant: str, *, create: bool) -> SessionRecord:
        return await self._call(self._take, session_id, tenant, create)

    async def load(self, session_id: str, tenant: str) -> SessionRecord:
        return await self._call(self._load, session_id, tenant)

    async def pin(self, session_id: str, epoch: int, worker: str) -> int:
        return await self._call(self._pin, session_id, epoch, worker)

    async def move(self, session_id: str, epoch: int, worker: str) -> int:
        return await self._call(self._move, session_id, epoch, worker)

    async def begin_turn(
        self, session_id: str, epoch: int, turn_id: str, keep_len: int, ids: array[int], request: bytes
    ) -> None:
        await self._call(self._begin_turn, session_id, epoch, turn_id, keep_len, ids, request)

    async def adopt_turn(self, session_id: str, tenant: str, turn_id: str) -> TurnRecord:
        return await self._call(self._adopt_turn, session_id, tenant, turn_id)

    async def append(self, session_id: str, epoch: int, turn_id: str, start: int, ids: list[int]) -> None:
        await self._call(self._append, session_id, epoch, turn_id, start, ids)

    async def complete_turn(self, session_id: str, epoch: int, turn_id: str, finish: str) -> None:
        await self._call(self._complete_turn, session_id, epoch, turn_id, finish)

    async def abort_turn(self, session_id: str, turn_id: str) -> bool:
        return await self._call(self._abort_turn, session_id, turn_id)

    async def leave_turn(self, session_id: str, turn_id: str) -> None:
        await self._call(self._leave_turn, session_id, turn_id)

    async def cut(self, session_id: str, epoch: int, keep_len: int) -> None:
        await self._call(self._cut, session_id, epoch, keep_len)

    async def fork(self, parent_id: str, tenant: str, child_id: str, at_len: int | None) -> SessionRecord:
        return await self._call(self._fork, parent_id, tenant, child_id, at_len)

    async def release(self, session_id: str, tenant: str) -> SessionRecord:
        return await self._call(self._release, session_id, tenant)

    async def owners(self, session_ids: list[str]) -> dict[str, tuple[str, int]]:
        return await self._call(self._owners, session_ids)

    async def put_objects(self, tenant: str, objects: dict[str, bytes]) -> None:
        await self._call(self._put_objects, tenant, objects)

    async def get_object(self, tenant: str, key: str) -> bytes | None:
        return await self._call(self._get_object, tenant, key)

    async def list_objects(self, tenant: str, prefix: str) -> list[tuple[str, bytes]]:
        return await self._call(self._list_objects, tenant, prefix)

    async def delete_objects(self, tenant: str, keys: list[str]) -> None:
        await self._call(self._delete_objects, tenant, keys)

    async def list_sessions(self, tenant: str) -> list[tuple[SessionRecord, int, bool]]:
        return await self._call(self._list_sessions, tenant)

    # ---- in the thread ----------------------------------------------------------------------------

    def _row(self, session_id: str) -> tuple[Any, ...]:
        row = self._db.execute(
            "SELECT tenant, worker, epoch, num_turns, released, turn_id, turn_keep_len "
            "FROM sessions WHERE session_id = ?",
            (session_id,),
        ).fetchone()
        if row is None:
            raise SessionNotFound(f"session {session_id} does not exist")
        return tuple(row)

    def _fenced(self, session_id: str, epoch: int) -> tuple[Any, ...]:
        row = self._row(session_id)
        if row[4]:
            raise SessionReleased(f"session {session_id} was released")
        if row[2] != epoch:
            raise StaleEpoch(f"session {session_id} is at epoch {row[2]}, epoch {epoch} has passed")
        return row

    def _beat(self) -> None:
        expires = time.time() + self._lease_s
        self._db.execute("INSERT OR REPLACE INTO routers VALUES (?, ?)", (self.router, expires))
        oldest = time.time() - self._retention_s
        self._db.execute("DELETE FROM sessions WHERE released AND released < ?", (oldest,))

    def _leave(self) -> None:
        self._db.execute("DELETE FROM routers WHERE router = ? OR expires < ?", (self.router, time.time()))

    def _take(self, session_id: str, tenant: str, create: bool) -> SessionRecord:
        known = self._db.execute("SELECT tenant FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        if create and known and known[0] != tenant:
            raise SessionExists(f"session {session_id} is somebody else's; choose another id")
        if create and not known:
            self._refuse_too_many(tenant)
            self._db.execute(
                "INSERT INTO sessions (session_id, tenant, router) VALUES (?, ?, ?)",
                (session_id, tenant, self.router),
            )
        record, turn_id = self._own(session_id, tenant)
        if turn_id:
            self._forget_turn(session_id)
        return record

    def _refuse_too_many(self, tenant: str) -> None:
        (count,) = self._db.execute(
            "SELECT count(*) FROM sessions WHERE tenant = ? AND NOT released", (tenant,)
        ).fetchone()
        if count >= self._max_sessions:
            raise TooManySessions(f"{count} of your sessions are open, no more may be; release some")

    def _own(self, session_id: str, tenant: str) -> tuple[SessionRecord, str]:
        """The session, this router's from now on; and the turn that was left open by the one before."""
        record = self._load(session_id, tenant)
        router, turn_id = self._router_of(session_id), self._row(session_id)[5]
        if router == self.router:
            return record, turn_id
        if turn_id and self._lives(router):
            raise SessionBusy(f"session {session_id} already has an active request, on another router")
        record.epoch += 1
        self._db.execute(
            "UPDATE sessions SET router = ?, epoch = ? WHERE session_id = ?", (self.router, record.epoch, session_id)
        )
        return record, turn_id

    def _router_of(self, session_id: str) -> str:
        row = self._db.execute("SELECT router FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        return str(row[0])

    def _adopt_turn(self, session_id: str, tenant: str, turn_id: str) -> TurnRecord:
        self._load(session_id, tenant)
        row = self._db.execute(
            "SELECT turn_id, turn_keep_len, turn_prompt_len, turn_request, last_turn_id, last_prompt_len, last_finish "
            "FROM sessions WHERE session_id = ?",
            (session_id,),
        ).fetchone()
        if turn_id not in (row[0], row[4]) or not turn_id:
            raise TurnNotFound(f"turn {turn_id} neither runs on session {session_id} nor is its last")
        record, _ = self._own(session_id, tenant)
        if turn_id == row[4]:
            # What the turn before asked for is there until another begins.
            return TurnRecord(record, row[5], row[5], record.tokens[row[5] :], b"" if row[0] else row[3], row[6])
        rows = self._db.execute("SELECT ids FROM turn_tokens WHERE session_id = ? ORDER BY start", (session_id,))
        tokens = array("i", b"".join(ids for (ids,) in rows))
        return TurnRecord(record, row[1], row[2], tokens, row[3])

    def _lives(self, router: str) -> bool:
        row = self._db.execute("SELECT expires FROM routers WHERE router = ?", (router,)).fetchone()
        return row is not None and row[0] >= time.time()

    def _load(self, session_id: str, tenant: str) -> SessionRecord:
        owner, worker, epoch, num_turns, released, _, _ = self._row(session_id)
        if owner != tenant:
            raise SessionNotFound(f"session {session_id} does not exist")
        if released:
            raise SessionReleased(f"session {session_id} was released")
        record = SessionRecord(session_id, tenant, worker, epoch, num_turns)
        for (ids,) in self._db.execute("SELECT ids FROM tokens WHERE session_id = ? ORDER BY start", (session_id,)):
            record.tokens.frombytes(ids)
        return record

    def _pin(self, session_id: str, epoch: int, worker: str) -> int:
        self._fenced(session_id, epoch)
        self._db.execute(
            "UPDATE sessions SET worker = ?, epoch = ? WHERE session_id = ?", (worker, epoch + 1, session_id)
        )
        return epoch + 1

    def _move(self, session_id: str, epoch: int, worker: str) -> int:
        self._at_rest(session_id, epoch)
        return self._pin(session_id, epoch, worker)

    def _at_rest(self, session_id: str, epoch: int) -> None:
        if self._fenced(session_id, epoch)[5]:
            raise SessionBusy(f"session {session_id} already has an active request")

    def _begin_turn(
        self, session_id: str, epoch: int, turn_id: str, keep_len: int, ids: array[int], request: bytes
    ) -> None:
        self._at_rest(session_id, epoch)
        self._db.execute(
            "UPDATE sessions SET turn_id = ?, turn_keep_len = ?, turn_prompt_len = ?, turn_request = ? "
            "WHERE session_id = ?",
            (turn_id, keep_len, keep_len + len(ids), request, session_id),
        )
        if ids:
            self._db.execute("INSERT INTO turn_tokens VALUES (?, ?, ?)", (session_id, keep_len, ids.tobytes()))

    def _of_turn(self, session_id: str, epoch: int, turn_id: str) -> tuple[Any, ...]:
        row = self._fenced(session_id, epoch)
        if row[5] != turn_id:
            raise StaleEpoch(f"turn {turn_id} is not the running turn of session {session_id}")
        return row

    def _append(self, session_id: str, epoch: int, turn_id: str, start: int, ids: list[int]) -> None:
        self._of_turn(session_id, epoch, turn_id)
        new = array("i", ids).tobytes()
        known = self._db.execute(
            "SELECT ids FROM turn_tokens WHERE session_id = ? AND start = ?", (session_id, start)
        ).fetchone()
        if known is None:
            self._db.execute("INSERT INTO turn_tokens VALUES (?, ?, ?)", (session_id, start, new))
        elif known[0] != new:
            raise StaleEpoch(f"position {start} of session {session_id} has other tokens")

    def _complete_turn(self, session_id: str, epoch: int, turn_id: str, finish: str) -> None:
        keep_len = self._of_turn(session_id, epoch, turn_id)[6]
        self._cut_tokens(session_id, keep_len)
        rows = self._db.execute("SELECT ids FROM turn_tokens WHERE session_id = ? ORDER BY start", (session_id,))
        ids = b"".join(row[0] for row in rows)
        if ids:
            self._db.execute("INSERT INTO tokens VALUES (?, ?, ?)", (session_id, keep_len, ids))
        self._db.execute(
            "UPDATE sessions SET num_turns = num_turns + 1, last_turn_id = ?, last_prompt_len = turn_prompt_len, "
            "last_finish = ? WHERE session_id = ?",
            (turn_id, finish, session_id),
        )
        self._forget_turn(session_id)

    def _abort_turn(self, session_id: str, turn_id: str) -> bool:
        ours = self._row(session_id)[5] == turn_id and self._router_of(session_id) == self.router
        if ours:
            self._forget_turn(session_id)
        return ours

    def _leave_turn(self, session_id: str, turn_id: str) -> None:
        self._db.execute(
            "UPDATE sessions SET router = '' WHERE session_id = ? AND turn_id = ? AND router = ?",
            (session_id, turn_id, self.router),
        )

    def _forget_turn(self, session_id: str) -> None:
        self._db.execute("DELETE FROM turn_tokens WHERE session_id = ?", (session_id,))
        self._db.execute("UPDATE sessions SET turn_id = '' WHERE session_id = ?", (session_id,))

    def _cut(self, session_id: str, epoch: int, keep_len: int) -> None:
        self._at_rest(session_id, epoch)
        self._cut_tokens(session_id, keep_len)
        self._db.execute("UPDATE sessions SET last_turn_id = '' WHERE session_id = ?", (session_id,))

    def _cut_tokens(self, session_id: str, keep_len: int) -> None:
        self._db.execute("DELETE FROM tokens WHERE session_id = ? AND start >= ?", (session_id, keep_len))
        self._db.execute(
            "UPDATE tokens SET ids = substr(ids, 1, 4 * (? - start)) "
            "WHERE session_id = ? AND start + length(ids) / 4 > ?",
            (keep_len, session_id, keep_len),
        )

    def _fork(self, parent_id: str, tenant: str, child_id: str, at_len: int | None) -> SessionRecord:
        known = self._load(parent_id, tenant)
        at_len = len(known.tokens) if at_len is None else at_len
        if not 0 <= at_len <= len(known.tokens):
            raise InvalidRequest(f"session {parent_id} has {len(known.tokens)} tokens, cannot fork it at {at_len}")
        if self._db.execute("SELECT 1 FROM sessions WHERE session_id = ?", (child_id,)).fetchone():
            raise SessionExists(f"session {child_id} is there already")
        self._refuse_too_many(tenant)
        child = SessionRecord(child_id, known.tenant, known.worker, 1, 0, known.tokens[:at_len])
        self._db.execute(
            "INSERT INTO sessions (session_id, tenant, worker, epoch, router) VALUES (?, ?, ?, 1, ?)",
            (child_id, known.tenant, known.worker, self.router),
        )
        if at_len:
            self._db.execute("INSERT INTO tokens VALUES (?, 0, ?)", (child_id, child.tokens.tobytes()))
        return child

    def _release(self, session_id: str, tenant: str) -> SessionRecord:
        owner, worker, epoch, num_turns, released, _, _ = self._row(session_id)
        if owner != tenant:
            raise SessionNotFound(f"session {session_id} does not exist")
        if not released:
            epoch += 1
            self._db.execute(
                "UPDATE sessions SET released = ?, epoch = ? WHERE session_id = ?", (time.time(), epoch, session_id)
            )
            self._db.execute("DELETE FROM tokens WHERE session_id = ?", (session_id,))
            self._forget_turn(session_id)
        return SessionRecord(session_id, owner, worker, epoch, num_turns)

    def _put_objects(self, tenant: str, objects: dict[str, bytes]) -> None:
        rows = [(tenant, key, value) for key, value in objects.items()]
        self._db.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", rows)

    def _get_object(self, tenant: str, key: str) -> bytes | None:
        row = self._db.execute("SELECT value FROM objects WHERE tenant = ? AND key = ?", (tenant, key)).fetchone()
        return row[0] if row is not None else None

    def _list_objects(self, tenant: str, prefix: str) -> list[tuple[str, bytes]]:
        # The first key that no longer begins so.
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        rows = self._db.execute(
            "SELECT key, value FROM objects WHERE tenant = ? AND key >= ? AND key < ? ORDER BY key",
            (tenant, prefix, end),
        )
        return list(rows)

    def _delete_objects(self, tenant: str, keys: list[str]) -> None:
        self._db.executemany("DELETE FROM objects WHERE tenant = ? AND key = ?", [(tenant, key) for key in keys])

    def _owners(self, session_ids: list[str]) -> dict[str, tuple[str, int]]:
        found = {}
        for session_id in session_ids:
            row = self._db.execute(
                "SELECT worker, epoch FROM sessions WHERE session_id = ? AND NOT released", (session_id,)
            ).fetchone()
            if row is not None:
                found[session_id] = (row[0], row[1])
        return found

    def _list_sessions(self, tenant: str) -> list[tuple[SessionRecord, int, bool]]:
        rows = self._db.execute(
            "SELECT s.session_id, s.tenant, s.worker, s.epoch, s.num_turns, s.turn_id != '', "
            "(SELECT coalesce(sum(length(ids)) / 4, 0) FROM tokens t WHERE t.session_id = s.session_id) "
            "FROM sessions s WHERE NOT released AND tenant = ? ORDER BY s.session_id",
            (tenant,),
        )
        return [(SessionRecord(*row[:5]), row[6], bool(row[5])) for row in rows]


def _answer(answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, value in answers:
        if future.done():
            continue
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)
