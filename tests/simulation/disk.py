"""The journal on a simulated disk: the real statements and the real group commit, without a thread."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from holdfast.errors import JournalUnavailable
from router.journal.interface import MAX_SESSIONS_PER_TENANT, ROUTER_LEASE_S, TOMBSTONE_RETENTION_S
from router.journal.sqlite import SqliteJournal, resolve
from router.journal.sqlite_store import SessionRow, SqliteStore


@dataclass
class Disk:
    """The disk under the journals' database."""

    rng: random.Random
    db: sqlite3.Connection = field(default_factory=lambda: sqlite3.connect(":memory:", isolation_level=None))
    latency_s: tuple[float, float] = (0.0002, 0.002)
    fails: float = 0.0
    """The probability that a statement fails."""
    loses_answers: float = 0.0
    """The probability that a commit's answer is lost."""

    @property
    def in_transaction(self) -> bool:
        return self.db.in_transaction

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        self._fail_sometimes(statement)
        return self.db.execute(statement, values)

    def executemany(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> sqlite3.Cursor:
        self._fail_sometimes(statement)
        return self.db.executemany(statement, rows)

    def _fail_sometimes(self, statement: str) -> None:
        if self.fails and statement != "ROLLBACK" and self.rng.random() < self.fails:
            raise sqlite3.OperationalError("disk I/O error")


class SimulatedStore(SqliteStore):
    """The real statements on a simulated disk. Reports each fenced write of a turn to ``wrote``."""

    def __init__(self, disk: Disk, router: str, wrote: Callable[[str, str, int], None]) -> None:
        super().__init__(
            disk,  # type: ignore[arg-type]
            router,
            lease_s=ROUTER_LEASE_S,
            max_sessions=lambda tenant: MAX_SESSIONS_PER_TENANT,
            retention_s=TOMBSTONE_RETENTION_S,
        )
        self._wrote = wrote

    def _fenced_turn(self, session_id: str, epoch: int, turn_id: str) -> SessionRow:
        row = super()._fenced_turn(session_id, epoch, turn_id)
        self._wrote(self.router, session_id, epoch)
        return row


class SimulatedJournal(SqliteJournal):
    """The real group commit, without a thread."""

    def __init__(self, disk: Disk, name: str, wrote: Callable[[str, str, int], None]) -> None:
        self._disk, self._db = disk, disk  # type: ignore[assignment]
        self._store = SimulatedStore(disk, name, wrote)
        self._lease_s = ROUTER_LEASE_S
        self._beats = None
        self._answers: list[tuple[asyncio.Future[Any], Any]] = []
        loop = asyncio.get_running_loop()
        collect = lambda answer, answers: self._answers.extend(answers)  # noqa: E731
        self._loop = SimpleNamespace(create_future=loop.create_future, call_soon_threadsafe=collect)  # type: ignore[assignment]
        self.num_commits = self.num_writes = 0
        self._waiting: list[Any] = []
        self._writer: asyncio.Task[None] | None = None

    def _call(self, function: Any, *args: Any) -> Any:
        future = self._loop.create_future()
        self._waiting.append((function, args, future))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())
        return future

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            await asyncio.sleep(self._disk.rng.uniform(*self._disk.latency_s))
            self._commit(group)
            await asyncio.sleep(self._disk.rng.uniform(*self._disk.latency_s))
            answers, self._answers = self._answers, []
            if self._disk.rng.random() < self._disk.loses_answers:
                lost = JournalUnavailable("the answer was lost")
                answers = [(future, lost) for future, _ in answers]
            resolve(answers)
        self._writer = None

    async def close(self) -> None:
        raise AssertionError("simulated routers are killed")
