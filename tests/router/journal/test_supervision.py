"""The supervisors' lease in both journals: one has it at a time, and its epoch grows with each change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cluster.leadership import Leadership, stand
from holdfast.errors import JournalUnavailable, StaleEpoch
from router.fleet.fleet import Fleet
from router.journal.supervision import LeaseStore, RedisLease, SqliteLease
from tests.redis_server import RedisServer, redis_server
from tests.waiting import until

LEASE_S, LONG_S, SHORT_S = 0.6, 600.0, 0.2
WAIT_S = 20.0


@pytest.fixture(params=["sqlite", "redis"])
async def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Callable[[], LeaseStore]]:
    """Makes connections to one lease."""
    if request.param == "redis":
        url = request.getfixturevalue("own_redis").url
        make: Callable[[], LeaseStore] = lambda: RedisLease(url)  # noqa: E731
    else:
        make = lambda: SqliteLease.open(tmp_path / "j.db")  # noqa: E731
    async with AsyncExitStack() as stack:

        def opened() -> LeaseStore:
            store = make()
            stack.push_async_callback(store.close)
            return store

        yield opened


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


async def test_one_has_the_lease_until_it_expires(open_store: Callable[[], LeaseStore]) -> None:
    one, other = open_store(), open_store()
    assert await one.acquire("a", LONG_S) == 1
    assert await other.acquire("b", LONG_S) is None
    assert await one.renew("a", LONG_S) and not await other.renew("b", LONG_S)
    assert await one.acquire("a", SHORT_S) == 2, "who starts over has another epoch"
    await asyncio.sleep(2 * SHORT_S)
    assert await other.acquire("b", LONG_S) == 3
    assert not await one.renew("a", LONG_S), "it woke up late"
    await one.give_up("a")
    assert await one.acquire("a", LONG_S) is None, "what is another's cannot be given up"
    await other.give_up("b")
    assert await one.acquire("a", LONG_S) == 4


async def test_a_leader_stops_when_it_cannot_prove_its_lease(own_redis: RedisServer) -> None:
    led, stores = list[str](), [RedisLease(own_redis.url) for _ in range(2)]

    def standing(name: str, store: RedisLease) -> tuple[Leadership, asyncio.Task[None]]:
        async def lead() -> None:
            led.append(name)
            try:
                await asyncio.Future()
            finally:
                led.remove(name)

        leadership = Leadership(store, name, LEASE_S)
        return leadership, asyncio.create_task(stand(leadership, lead))

    one, other = standing("a", stores[0]), standing("b", stores[1])
    try:
        await until(lambda: len(led) == 1, WAIT_S, "one of them to lead")
        first = one if led == ["a"] else other
        own_redis.kill()
        epoch = max(one[0].epoch, other[0].epoch)
        await until(lambda: not led, WAIT_S, "it to stop")
        with pytest.raises(StaleEpoch):
            first[0].check()
        own_redis.start()
        await until(lambda: len(led) == 1, WAIT_S, "one of them to lead again")
        assert max(one[0].epoch, other[0].epoch) > epoch
    finally:
        for _, task in (one, other):
            task.cancel()
        await asyncio.gather(one[1], other[1], return_exceptions=True)
        for store in stores:
            await store.close()


async def test_who_cannot_be_asked_says_so() -> None:
    store = RedisLease("redis://127.0.0.1:1")
    with pytest.raises(JournalUnavailable):
        await store.acquire("a", LEASE_S)
    await store.close()


async def test_a_router_does_not_believe_a_supervisor_that_was_replaced() -> None:
    fleet = Fleet(1.0, None, None, lambda link: None)  # type: ignore[arg-type]  # there are no workers
    await fleet.set_workers([], epoch=2)
    with pytest.raises(StaleEpoch, match="epoch 2"):
        await fleet.set_workers([], epoch=1)
    await fleet.set_workers([], epoch=2)
