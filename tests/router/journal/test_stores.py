"""SQLite and Redis each: group commit, failing disks, servers that go away."""

from __future__ import annotations

import asyncio
import gc
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from redis.asyncio import Redis

from holdfast.errors import (
    ConfigError,
    JournalUnavailable,
)
from router.journal.redis import RedisJournal
from router.journal.sqlite import SqliteJournal
from tests.redis_server import RedisServer, redis_server
from tests.router.journal.records import ids, take, turn


async def test_concurrent_writes_share_commits(sqlite_journal: SqliteJournal) -> None:
    await asyncio.gather(*(take(sqlite_journal, f"s{i}", "me") for i in range(200)))
    assert sqlite_journal.num_writes == 200
    assert sqlite_journal.num_commits < 100, "group commit"


async def test_bad_write_fails_alone(sqlite_journal: SqliteJournal) -> None:
    await take(sqlite_journal, "s", "me")
    await sqlite_journal.begin_turn("s", 0, "t", 0, ids(1), b"")
    results = await asyncio.gather(
        sqlite_journal.append("s", 0, "t", 1, [2**40]),  # no token id: it cannot be written
        sqlite_journal.append("s", 0, "t", 1, [2]),
        take(sqlite_journal, "other", "me"),
        return_exceptions=True,
    )
    assert isinstance(results[0], JournalUnavailable) and results[1] is None and results[2].session_id == "other"
    await sqlite_journal.complete_turn("s", 0, "t", "stop")
    assert (await sqlite_journal.load("s", "me")).tokens == ids(1, 2)


async def test_the_number_of_open_sessions_is_kept_through_all_that_opens_and_releases_them(tmp_path: Path) -> None:
    path, rng = tmp_path / "j.db", random.Random(7)
    tenants = [f"tenant-{i}" for i in range(3)]

    def counts() -> tuple[dict[str, int], dict[str, int]]:
        with closing(sqlite3.connect(path)) as db:
            kept = dict(db.execute("SELECT tenant, num_open FROM tenants WHERE num_open"))
            return kept, dict(db.execute("SELECT tenant, count(*) FROM sessions WHERE NOT released GROUP BY tenant"))

    for _ in range(3):  # routers, one after another
        journal = SqliteJournal(path, "process", lease_s=0.2, tombstone_retention_s=0.1)
        await journal.start()
        for _ in range(60):
            tenant = rng.choice(tenants)
            session = f"{tenant}/{rng.randrange(8)}"
            if rng.random() < 0.5:
                await asyncio.gather(journal.take(session, tenant, create=True), return_exceptions=True)
            elif rng.random() < 0.3:
                child = f"{tenant}/{rng.randrange(8)}"
                await asyncio.gather(journal.fork(session, tenant, child, None), return_exceptions=True)
            else:
                await asyncio.gather(journal.release(session, tenant), return_exceptions=True)
            await asyncio.sleep(0.005)  # tombstones go too, and their names can be taken again
        kept, counted = counts()
        assert kept == counted and sum(kept.values()) > 3
        await journal.close()
    with closing(sqlite3.connect(path)) as db:
        db.executescript("DROP TABLE tenants")  # as in a file that an older router made
    await SqliteJournal(path, "process").close()
    kept, counted = counts()
    assert kept == counted


async def test_failing_disk_is_a_clear_error_and_service_returns(sqlite_journal: SqliteJournal) -> None:
    await take(sqlite_journal, "s", "me")
    real = sqlite_journal._db

    class Broken:
        in_transaction = False

        def execute(self, *args: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

    sqlite_journal._db = Broken()  # type: ignore[assignment]
    with pytest.raises(JournalUnavailable, match="disk I/O error"):
        await sqlite_journal.begin_turn("s", 0, "t", 0, ids(1), b"")
    sqlite_journal._db = real
    await turn(sqlite_journal, 0, ids(1), [2])
    assert (await sqlite_journal.load("s", "me")).tokens == ids(1, 2)


async def test_a_redis_that_goes_away_is_a_clear_error_and_service_returns(tmp_path: Path) -> None:
    with redis_server(tmp_path / "r") as server:
        journal = RedisJournal(server.url, "process")
        await journal.start()
        await take(journal)
        await turn(journal, 0, ids(1), [2])
        await journal.begin_turn("s", 0, "t2", 2, ids(3), b"")
        server.kill()
        with pytest.raises(JournalUnavailable):
            await journal.append("s", 0, "t2", 3, [4])
        server.start()
        await journal.append("s", 0, "t2", 3, [4])
        await journal.complete_turn("s", 0, "t2", "stop")
        assert (await journal.load("s", "me")).tokens == ids(1, 2, 3, 4), "kill -9 lost nothing that was answered"
        await journal.close()


@pytest.mark.parametrize(
    ("options", "durability", "message"),
    [
        (("--appendonly", "no"), "process", "set appendonly yes"),
        (("--appendonly", "yes", "--appendfsync", "everysec"), "power", "appendfsync always"),
    ],
)
async def test_a_redis_that_cannot_keep_the_promise_is_refused(
    tmp_path: Path, options: tuple[str, ...], durability: str, message: str
) -> None:
    with redis_server(tmp_path / "r", *options) as server:
        journal = RedisJournal(server.url, durability)
        with pytest.raises(ConfigError, match=message):
            await journal.start()
        await journal.close()


async def test_a_cancelled_caller_leaves_no_connection_behind(redis: RedisServer) -> None:
    """As when clients hang up: at any moment of a command, and right before the router stops."""
    for attempt in range(20):
        journal = RedisJournal(redis.url, "process")
        await journal.start()
        calls = [asyncio.create_task(journal.put_objects("cancelled", {f"a/{i}": b"x" * 50_000})) for i in range(12)]
        calls += [asyncio.create_task(take(journal, f"cancelled-{attempt}-{i}", "me")) for i in range(12)]
        await asyncio.sleep(attempt * 0.0005)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await journal.close()
        del journal, calls
    gc.collect()  # an open socket warns, which is an error here


async def test_no_redis_is_a_clear_error() -> None:
    journal = RedisJournal("redis://127.0.0.1:1/0", "process")
    with pytest.raises(ConfigError, match="no Redis answers at redis://127"):
        await journal.start()
    await journal.close()


async def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "old.db") as old:
        old.execute("CREATE TABLE sessions (session_id TEXT)")
    with pytest.raises(ConfigError, match="of another version of Holdfast"):
        SqliteJournal(tmp_path / "old.db", "process")


async def test_a_redis_of_another_version_is_refused(redis: RedisServer) -> None:
    async with Redis.from_url(redis.url) as client:
        await client.set("holdfast:version", 7)
        journal = RedisJournal(redis.url, "process")
        try:
            with pytest.raises(ConfigError, match=r"of another version of Holdfast \(7, not 1\)"):
                await journal.start()
        finally:
            await journal.close()
            await client.delete("holdfast:version")
