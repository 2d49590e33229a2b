"""The supervisors' lease in the journal: one of them acts at a time, under an epoch that grows with each change."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from holdfast.errors import ConfigError, JournalUnavailable
from router.journal.sqlite_file import open_file

TIMEOUT_S = 2.0
"""Of Redis's answer: well below the lease."""
LEASE, EPOCH = "holdfast:supervisor", "holdfast:supervisor-epoch"
ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return redis.call('INCR', KEYS[2])
"""
RENEW = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
GIVE_UP = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0
"""


class LeaseStore(Protocol):
    """One supervisor's connection to the lease. All methods may raise JournalUnavailable."""

    async def acquire(self, holder: str, lease_s: float) -> int | None:
        """Take the lease for ``lease_s`` if nobody else has it. Returns its new epoch; None: somebody has it."""

    async def renew(self, holder: str, lease_s: float) -> bool:
        """Have the lease for ``lease_s`` from now on. Returns whether it was still the holder's."""

    async def give_up(self, holder: str) -> None:
        """Let others take the lease at once, if it is the holder's."""

    async def close(self) -> None: ...


class SqliteLease:
    """The lease in a journal's SQLite file. Expiry is in seconds of this machine's clock."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path) -> SqliteLease:
        """Raises ConfigError, JournalUnavailable."""
        return cls(open_file(path, "NORMAL"))

    async def acquire(self, holder: str, lease_s: float) -> int | None:
        now = time.time()
        row = await self._fetch(
            "INSERT INTO supervisor VALUES (1, ?, 1, ?) ON CONFLICT (id) DO UPDATE SET holder = excluded.holder, "
            "epoch = epoch + 1, expires = excluded.expires WHERE expires < ? OR holder = excluded.holder "
            "RETURNING epoch",
            (holder, now + lease_s, now),
        )
        return row and int(row[0])

    async def renew(self, holder: str, lease_s: float) -> bool:
        statement = "UPDATE supervisor SET expires = ? WHERE holder = ? RETURNING epoch"
        return await self._fetch(statement, (time.time() + lease_s, holder)) is not None

    async def give_up(self, holder: str) -> None:
        await self._fetch("UPDATE supervisor SET expires = 0, holder = '' WHERE holder = ?", (holder,))

    async def close(self) -> None:
        await asyncio.to_thread(self._db.close)

    async def _fetch(self, statement: str, values: tuple[Any, ...]) -> Any:
        return await asyncio.to_thread(self._fetch_now, statement, values)

    def _fetch_now(self, statement: str, values: tuple[Any, ...]) -> Any:
        with self._lock:
            try:
                rows = self._db.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise JournalUnavailable(f"the journal cannot be written: {error}") from None
        return rows[0] if rows else None


class RedisLease:
    """The lease as a key that expires by Redis's clock, beside its epoch."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError."""
        try:
            self._redis = Redis.from_url(
                url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
            )
        except ValueError as error:
            raise ConfigError(f"journal_url: {error}") from None

    async def acquire(self, holder: str, lease_s: float) -> int | None:
        return await self._run(ACQUIRE, holder, lease_s) or None

    async def renew(self, holder: str, lease_s: float) -> bool:
        return bool(await self._run(RENEW, holder, lease_s))

    async def give_up(self, holder: str) -> None:
        await self._run(GIVE_UP, holder, 0.0)

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run(self, script: str, holder: str, lease_s: float) -> int:
        try:
            answer: Any = await self._redis.eval(script, 2, LEASE, EPOCH, holder, round(1000 * lease_s))
        except (RedisError, OSError) as error:
            raise JournalUnavailable(f"the journal cannot be written: {error}") from None
        return int(answer)
