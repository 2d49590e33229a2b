"""The journal: what every session is, durably. Tokens are shown only after it has them (law L10).

``Journal`` is the interface; ``SqliteJournal`` keeps it in one SQLite file in WAL mode. Writes are
group-committed: what arrives while one transaction is being committed goes into the next. Every write
to a session carries its epoch, and a stale one is refused (law L11).
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

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
)

T = TypeVar("T")
MAX_GROUP = 512
"""Writes in one transaction: bounds how long the first of them waits for the last."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    worker TEXT NOT NULL DEFAULT '',
    epoch INTEGER NOT NULL DEFAULT 0,
    num_turns INTEGER NOT NULL DEFAULT 0,
    released INTEGER NOT NULL DEFAULT 0,
    turn_id TEXT NOT NULL DEFAULT '',
    turn_keep_len INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
-- The session as of its last good turn, and what its running turn adds after turn_keep_len. They
-- become one when the turn completes; an aborted turn is simply forgotten.
CREATE TABLE IF NOT EXISTS tokens (
    session_id TEXT NOT NULL, start INTEGER NOT NULL, ids BLOB NOT NULL,
    PRIMARY KEY (session_id, start)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turn_tokens (
    session_id TEXT NOT NULL, start INTEGER NOT NULL, ids BLOB NOT NULL,
    PRIMARY KEY (session_id, start)
) WITHOUT ROWID;
"""


@dataclass(slots=True)
class SessionRecord:
    """A session as the journal has it. ``worker`` names the pin: ``worker_id@incarnation``."""

    session_id: str
    tenant: str
    worker: str = ""
    epoch: int = 0
    num_turns: int = 0
    tokens: array[int] = field(default_factory=lambda: array("i"))


class Journal(Protocol):
    """What a router needs of a journal. All may raise JournalUnavailable."""

    async def open(self, session_id: str, tenant: str) -> SessionRecord:
        """The session, made if there is none. Raises SessionReleased, SessionNotFound (another tenant's)."""

    async def load(self, session_id: str, tenant: str) -> SessionRecord:
        """Raises SessionNotFound, SessionReleased."""

    async def pin(self, session_id: str, epoch: int, worker: str) -> int:
        """Give the session to ``worker`` if its epoch is still ``epoch``; returns the next one."""

    async def begin_turn(self, session_id: str, epoch: int, turn_id: str, keep_len: int, ids: array[int]) -> None:
        """A turn starts: the session's first ``keep_len`` tokens, then ``ids``. Raises SessionBusy."""

    async def append(self, session_id: str, epoch: int, turn_id: str, start: int, ids: list[int]) -> None:
        """Tokens of the running turn, from position ``start`` of the session on."""

    async def complete_turn(self, session_id: str, epoch: int, turn_id: str) -> None:
        """The turn's tokens become the session's."""

    async def abort_turn(self, session_id: str, turn_id: str) -> None:
        """Back to the last good turn. Again, or unknown: nothing happens."""

    async def cut(self, session_id: str, epoch: int, keep_len: int) -> None:
        """Keep the first ``keep_len`` tokens. Raises SessionBusy."""

    async def fork(self, parent: SessionRecord, child_id: str, at_len: int) -> SessionRecord:
        """A new session with the parent's first ``at_len`` tokens, pin and tenant."""

    async def release(self, session_id: str, tenant: str) -> SessionRecord:
        """Leave a tombstone; returns what the session was. Again: the same."""

    async def list_sessions(self, tenant: str) -> list[tuple[SessionRecord, int, bool]]:
        """The tenant's sessions, each with its length in tokens and whether a turn runs."""


class SqliteJournal:
    """See ``Journal``. One thread owns the database; ``close`` ends it."""

    def __init__(self, path: Path, durability: str) -> None:
        if durability not in ("process", "power"):
            raise ConfigError(f"journal_durability: {durability!r} is not one of process, power")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sync = {"process": "NORMAL", "power": "FULL"}[durability]
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]] | None]
        self._queue = queue.SimpleQueue()
        self.num_commits = 0
        self.num_writes = 0
        self._db = self._connect()
        self._thread = threading.Thread(target=self._run, name="holdfast-journal", daemon=True)
        self._thread.start()

    def _connect(self) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=5.0)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA synchronous={self._sync}")
            db.executescript(SCHEMA)
            # Turns that a router left behind when it died: their sessions are at their last good turn.
            db.execute("DELETE FROM turn_tokens")
            db.execute("UPDATE sessions SET turn_id = '' WHERE turn_id != ''")
        except sqlite3.Error as error:
            raise JournalUnavailable(f"journal {self._path}: {error}") from error
        return db

    def close(self) -> None:
        """Commit what is queued, then close the file."""
        self._queue.put(None)
        self._thread.join()
        self._db.close()

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
        except sqlite3.Error as error:
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

    async def open(self, session_id: str, tenant: str) -> SessionRecord:
        return await self._call(self._open, session_id, tenant)

    async def load(self, session_id: str, tenant: str) -> SessionRecord:
        return await self._call(self._load, session_id, tenant)

    async def pin(self, session_id: str, epoch: int, worker: str) -> int:
        return await self._call(self._pin, session_id, epoch, worker)

    async def begin_turn(self, session_id: str, epoch: int, turn_id: str, keep_len: int, ids: array[int]) -> None:
        await self._call(self._begin_turn, session_id, epoch, turn_id, keep_len, ids)

    async def append(self, session_id: str, epoch: int, turn_id: str, start: int, ids: list[int]) -> None:
        await self._call(self._append, session_id, epoch, turn_id, start, ids)

    async def complete_turn(self, session_id: str, epoch: int, turn_id: str) -> None:
        await self._call(self._complete_turn, session_id, epoch, turn_id)

    async def abort_turn(self, session_id: str, turn_id: str) -> None:
        await self._call(self._abort_turn, session_id, turn_id)

    async def cut(self, session_id: str, epoch: int, keep_len: int) -> None:
        await self._call(self._cut, session_id, epoch, keep_len)

    async def fork(self, parent: SessionRecord, child_id: str, at_len: int) -> SessionRecord:
        return await self._call(self._fork, parent, child_id, at_len)

    async def release(self, session_id: str, tenant: str) -> SessionRecord:
        return await self._call(self._release, session_id, tenant)

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

    def _open(self, session_id: str, tenant: str) -> SessionRecord:
        self._db.execute("INSERT OR IGNORE INTO sessions (session_id, tenant) VALUES (?, ?)", (session_id, tenant))
        return self._load(session_id, tenant)

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

    def _begin_turn(self, session_id: str, epoch: int, turn_id: str, keep_len: int, ids: array[int]) -> None:
        row = self._fenced(session_id, epoch)
        if row[5]:
            raise SessionBusy(f"session {session_id} already has an active request")
        self._db.execute(
            "UPDATE sessions SET turn_id = ?, turn_keep_len = ? WHERE session_id = ?", (turn_id, keep_len, session_id)
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
        self._db.execute("INSERT INTO turn_tokens VALUES (?, ?, ?)", (session_id, start, array("i", ids).tobytes()))

    def _complete_turn(self, session_id: str, epoch: int, turn_id: str) -> None:
        keep_len = self._of_turn(session_id, epoch, turn_id)[6]
        self._cut_tokens(session_id, keep_len)
        rows = self._db.execute("SELECT ids FROM turn_tokens WHERE session_id = ? ORDER BY start", (session_id,))
        ids = b"".join(row[0] for row in rows)
        if ids:
            self._db.execute("INSERT INTO tokens VALUES (?, ?, ?)", (session_id, keep_len, ids))
        self._db.execute("UPDATE sessions SET num_turns = num_turns + 1 WHERE session_id = ?", (session_id,))
        self._forget_turn(session_id)

    def _abort_turn(self, session_id: str, turn_id: str) -> None:
        row = self._row(session_id)
        if row[5] == turn_id:
            self._forget_turn(session_id)

    def _forget_turn(self, session_id: str) -> None:
        self._db.execute("DELETE FROM turn_tokens WHERE session_id = ?", (session_id,))
        self._db.execute("UPDATE sessions SET turn_id = '' WHERE session_id = ?", (session_id,))

    def _cut(self, session_id: str, epoch: int, keep_len: int) -> None:
        row = self._fenced(session_id, epoch)
        if row[5]:
            raise SessionBusy(f"session {session_id} already has an active request")
        self._cut_tokens(session_id, keep_len)

    def _cut_tokens(self, session_id: str, keep_len: int) -> None:
        self._db.execute("DELETE FROM tokens WHERE session_id = ? AND start >= ?", (session_id, keep_len))
        self._db.execute(
            "UPDATE tokens SET ids = substr(ids, 1, 4 * (? - start)) "
            "WHERE session_id = ? AND start + length(ids) / 4 > ?",
            (keep_len, session_id, keep_len),
        )

    def _fork(self, parent: SessionRecord, child_id: str, at_len: int) -> SessionRecord:
        known = self._load(parent.session_id, parent.tenant)
        if not 0 <= at_len <= len(known.tokens):
            raise InvalidRequest(
                f"session {parent.session_id} has {len(known.tokens)} tokens, cannot fork it at {at_len}"
            )
        if self._db.execute("SELECT 1 FROM sessions WHERE session_id = ?", (child_id,)).fetchone():
            raise SessionExists(f"session {child_id} is there already")
        child = SessionRecord(child_id, known.tenant, known.worker, 1, 0, known.tokens[:at_len])
        self._db.execute(
            "INSERT INTO sessions (session_id, tenant, worker, epoch) VALUES (?, ?, ?, 1)",
            (child_id, known.tenant, known.worker),
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
            self._db.execute("UPDATE sessions SET released = 1, epoch = ? WHERE session_id = ?", (epoch, session_id))
            self._db.execute("DELETE FROM tokens WHERE session_id = ?", (session_id,))
            self._forget_turn(session_id)
        return SessionRecord(session_id, owner, worker, epoch, num_turns)

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
