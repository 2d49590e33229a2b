"""A journal in either implementation, over which any number of routers connect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from router.journal.interface import Journal
from router.journal.redis import RedisJournal
from router.journal.sqlite import SqliteJournal
from tests.redis_server import RedisServer
from tests.router.journal.records import LEASE_S, Connect


@pytest.fixture(params=["sqlite", "redis"])
async def connect(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    """Another router's end of one journal, each time it is called."""
    ends: list[Journal] = []
    url = None
    if request.param == "redis":
        # A database of its own for each test.
        server: RedisServer = request.getfixturevalue("redis")
        url = server.url
        async with Redis.from_url(url) as client:
            await client.flushall()

    async def end() -> Journal:
        made = RedisJournal(url, "process", LEASE_S) if url else SqliteJournal(tmp_path / "j.db", "process", LEASE_S)
        await made.start()
        ends.append(made)
        return made

    yield end
    for made in ends:
        await made.close()


@pytest.fixture
async def journal(connect: Connect) -> Journal:
    return await connect()


@pytest.fixture
async def sqlite_journal(tmp_path: Path) -> AsyncIterator[SqliteJournal]:
    journal = SqliteJournal(tmp_path / "j.db", "process")
    yield journal
    await journal.close()
