from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.harness import Harness, running
from tests.redis_server import RedisServer, redis_server


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running(tmp_path) as harness:
        yield harness
        await harness.assert_no_leak()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
async def two_routers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    """Two routers over one journal, in each of its stores."""
    settings = {}
    if request.param == "redis":
        settings["journal_url"] = url = request.getfixturevalue("redis").url
        async with Redis.from_url(url) as client:
            await client.flushall()
    async with running(tmp_path, num_routers=2, **settings) as cluster:
        yield cluster
        await cluster.assert_no_leak()
