"""The journal in both its stores: fencing, ownership, roll back, tombstones, what goes away and returns."""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from holdfast.errors import (
    ConfigError,
    InvalidRequest,
    JournalUnavailable,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    SessionReleased,
    StaleEpoch,
    TooManySessions,
)
from router.journal import Journal, SessionRecord
from router.redis_journal import RedisJournal
from router.sqlite_journal import SqliteJournal
from tests.redis_server import RedisServer, redis_server

LEASE_S = 0.4
Connect = Callable[[], Awaitable[Journal]]


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


async def take(journal: Journal, session_id: str = "s", tenant: str = "me") -> SessionRecord:
    return await journal.take(session_id, tenant, create=True)


def ids(*values: int) -> array:
    return array("i", values)


async def turn(journal: Journal, keep: int, given: array, output: list[int], epoch: int = 0) -> None:
    await journal.begin_turn("s", epoch, "t", keep, given, b"")
    for i, token in enumerate(output):
        await journal.append("s", epoch, "t", keep + len(given) + i, [token])
    await journal.complete_turn("s", epoch, "t", "stop")


async def test_what_a_session_is_called_touches_no_other(connect: Connect) -> None:
    journal = await connect()
    names = ["s", "s:tokens", "s:turn", "tokens:s", "s:tokens:turn", "'; drop table sessions; --", "é漢 \\ %00"]
    for number, name in enumerate(names):
        epoch = (await journal.take(name, f"tenant-{number % 2}", create=True)).epoch
        await journal.begin_turn(name, epoch, "t", 0, array("i", [number]), b"")
        await journal.append(name, epoch, "t", 1, [number + 100])
        await journal.complete_turn(name, epoch, "t", "stop")
    for number, name in enumerate(names):
        assert list((await journal.load(name, f"tenant-{number % 2}")).tokens) == [number, number + 100]


async def test_turns_append_and_rewind(journal: Journal) -> None:
    await take(journal, "s", "me")
    await turn(journal, 0, ids(1, 2), [3, 4])
    await turn(journal, 4, ids(5), [6])
    assert (await journal.load("s", "me")).tokens == ids(1, 2, 3, 4, 5, 6)
    await turn(journal, 3, ids(7), [8])
    record = await journal.load("s", "me")
    assert (record.tokens, record.num_turns) == (ids(1, 2, 3, 7, 8), 3)


async def test_aborted_rewind_brings_back_what_it_cut(journal: Journal) -> None:
    await take(journal, "s", "me")
    await turn(journal, 0, ids(1, 2), [3, 4])
    await journal.begin_turn("s", 0, "t2", 1, ids(9), b"")
    await journal.append("s", 0, "t2", 2, [10])
    await journal.abort_turn("s", "t2")
    await journal.abort_turn("s", "t2")
    assert (await journal.load("s", "me")).tokens == ids(1, 2, 3, 4)


async def test_stale_epoch_is_refused_everywhere(journal: Journal) -> None:
    await take(journal, "s", "me")
    assert await journal.pin("s", 0, "w@1") == 1
    await journal.begin_turn("s", 1, "t", 0, ids(1), b"")
    assert await journal.pin("s", 1, "w@2") == 2
    for stale in (
        journal.append("s", 1, "t", 1, [2]),
        journal.complete_turn("s", 1, "t", "stop"),
        journal.begin_turn("s", 1, "t2", 0, ids(1), b""),
        journal.cut("s", 1, 0),
        journal.pin("s", 1, "w@3"),
    ):
        with pytest.raises(StaleEpoch):
            await stale
    await journal.append("s", 2, "t", 1, [2])
    await journal.complete_turn("s", 2, "t", "stop")
    assert (await journal.load("s", "me")).tokens == ids(1, 2)


async def test_one_turn_at_a_time(journal: Journal) -> None:
    await take(journal, "s", "me")
    await journal.begin_turn("s", 0, "t", 0, ids(1), b"")
    with pytest.raises(SessionBusy):
        await journal.begin_turn("s", 0, "t2", 0, ids(1), b"")
    with pytest.raises(SessionBusy):
        await journal.cut("s", 0, 0)


async def test_tombstone_outlives_everything(journal: Journal, connect: Connect) -> None:
    await take(journal, "s", "me")
    await journal.begin_turn("s", 0, "t", 0, ids(1), b"")
    first = await journal.release("s", "me")
    assert (await journal.release("s", "me")).epoch == first.epoch == 1
    for late in (journal.append("s", 0, "t", 1, [2]), take(journal, "s", "me"), journal.pin("s", 1, "w")):
        with pytest.raises(SessionReleased):
            await late
    with pytest.raises(SessionReleased):
        await take(await connect())


async def test_other_tenants_sessions_are_not_there(journal: Journal) -> None:
    await take(journal, "s", "me")
    for call in (journal.take("s", "you", create=False), journal.load("s", "you"), journal.release("s", "you")):
        with pytest.raises(SessionNotFound):
            await call
    with pytest.raises(SessionExists):
        await take(journal, "s", "you")
    assert await journal.list_sessions("you") == []
    with pytest.raises(SessionExists):
        await journal.fork("s", "me", "s", 0)


async def test_concurrent_writes_share_commits(sqlite_journal: SqliteJournal) -> None:
    await asyncio.gather(*(take(sqlite_journal, f"s{i}", "me") for i in range(200)))
    assert sqlite_journal.num_writes == 200
    assert sqlite_journal.num_commits < 100, "group commit"


async def test_refused_write_leaves_its_group_alone(journal: Journal) -> None:
    await take(journal, "s", "me")
    results = await asyncio.gather(
        journal.pin("s", 0, "a"), journal.pin("s", 0, "b"), take(journal, "t", "me"), return_exceptions=True
    )
    assert results[0] == 1 and isinstance(results[1], StaleEpoch)
    assert (await journal.load("s", "me")).worker == "a"


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


TURNS = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, 9), max_size=4), st.sampled_from(["ok", "abort", "cut"])),
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS)
async def test_journal_equals_a_list(journal: Journal, turns: list) -> None:
    name = uuid.uuid4().hex
    await take(journal, name)
    model: list[int] = []
    for back, output, kind in turns:
        keep = max(0, len(model) - back)
        if kind == "cut":
            await journal.cut(name, 0, keep)
            del model[keep:]
            continue
        given = [77] if keep % 2 else []  # a turn may only say again what the session has
        await journal.begin_turn(name, 0, "t", keep, ids(*given), b"")
        for i, token in enumerate(output):
            await journal.append(name, 0, "t", keep + len(given) + i, [token])
        if kind == "ok":
            await journal.complete_turn(name, 0, "t", "stop")
            model = [*model[:keep], *given, *output]
        else:
            await journal.abort_turn(name, "t")
    assert list((await journal.load(name, "me")).tokens) == model
    lengths = {record.session_id: length for record, length, _ in await journal.list_sessions("me")}
    assert lengths[name] == len(model)


# ---- many routers -----------------------------------------------------------------------------------


async def test_a_session_belongs_to_the_router_that_took_it_last(journal: Journal, connect: Connect) -> None:
    other = await connect()
    assert (await take(journal)).epoch == 0
    await turn(journal, 0, ids(1), [2])
    taken = await take(other)
    assert (taken.epoch, taken.tokens) == (1, ids(1, 2))
    assert (await take(other)).epoch == 1, "its own: nothing changes"
    with pytest.raises(StaleEpoch):
        await journal.begin_turn("s", 0, "t2", 2, ids(3), b"")
    await turn(other, 2, ids(3), [4], epoch=1)
    assert (await take(journal)).tokens == ids(1, 2, 3, 4)


async def test_what_a_living_router_runs_is_busy(journal: Journal, connect: Connect) -> None:
    other = await connect()
    await take(journal)
    await journal.begin_turn("s", 0, "t", 0, ids(1), b"")
    for _ in range(8):  # longer than a lease: it beats
        with pytest.raises(SessionBusy):
            await take(other)
        await asyncio.sleep(LEASE_S / 4)
    await journal.append("s", 0, "t", 1, [2])
    await journal.complete_turn("s", 0, "t", "stop")
    assert (await take(other)).tokens == ids(1, 2)


async def test_what_a_dead_router_ran_is_rolled_back(journal: Journal, connect: Connect) -> None:
    other = await connect()
    await take(journal)
    await turn(journal, 0, ids(1), [2])
    await journal.begin_turn("s", 0, "t", 2, ids(3), b"")
    await journal.append("s", 0, "t", 3, [4])
    assert isinstance(journal, SqliteJournal | RedisJournal) and journal._beats is not None
    journal._beats.cancel()  # as if it had been killed, or paused
    for _ in range(200):
        try:
            taken = await take(other)
            break
        except SessionBusy:
            await asyncio.sleep(LEASE_S / 20)
    assert (taken.tokens, taken.epoch) == (ids(1, 2), 1)
    for late in (journal.append("s", 0, "t", 4, [5]), journal.complete_turn("s", 0, "t", "stop")):
        with pytest.raises(StaleEpoch):
            await late


async def test_a_turn_that_is_left_is_anybody_s(journal: Journal, connect: Connect) -> None:
    other = await connect()
    await take(journal, "s", "me")
    await journal.begin_turn("s", 0, "t", 0, ids(1, 2), b"how")
    await journal.append("s", 0, "t", 2, [3])
    await other.leave_turn("s", "t")  # not its own: nothing happens
    await journal.leave_turn("s", "another")
    with pytest.raises(SessionBusy):
        await other.adopt_turn("s", "me", "t")
    await journal.leave_turn("s", "t")
    adopted = await other.adopt_turn("s", "me", "t")
    assert (adopted.tokens, adopted.prompt_len, adopted.request, adopted.session.epoch) == (ids(1, 2, 3), 2, b"how", 1)
    with pytest.raises(StaleEpoch):
        await journal.append("s", 0, "t", 3, [9])
    await journal.leave_turn("s", "t")
    with pytest.raises(SessionBusy):
        await take(journal, "s", "me")  # it is the other's now
    await other.leave_turn("s", "t")
    assert (await take(journal, "s", "me")).tokens == ids(), "who takes the session instead rolls the turn back"


async def test_only_a_session_at_rest_is_moved(journal: Journal, connect: Connect) -> None:
    other = await connect()
    await take(journal, "s", "me")
    epoch = await journal.pin("s", 0, "w0@1")
    await turn(journal, 0, ids(1, 2), [3], epoch)
    assert await other.move("s", epoch, "w1@1") == epoch + 1, "by any router"
    with pytest.raises(StaleEpoch):
        await journal.move("s", epoch, "w2@1")
    assert (await journal.owners(["s"])) == {"s": ("w1@1", epoch + 1)}
    await journal.begin_turn("s", epoch + 1, "t2", 3, ids(4), b"")
    with pytest.raises(SessionBusy):
        await other.move("s", epoch + 1, "w2@1")
    await journal.release("s", "me")
    with pytest.raises(SessionReleased):
        await other.move("s", epoch + 1, "w2@1")


async def test_a_router_that_wakes_cannot_roll_back_the_turn_that_another_went_on_with(
    journal: Journal, connect: Connect
) -> None:
    other = await connect()
    await take(journal)
    await journal.begin_turn("s", 0, "t", 0, ids(3), b"")
    assert isinstance(journal, SqliteJournal | RedisJournal) and journal._beats is not None
    journal._beats.cancel()
    for _ in range(200):
        try:
            adopted = await other.adopt_turn("s", "me", "t")
            break
        except SessionBusy:
            await asyncio.sleep(LEASE_S / 20)
    assert not await journal.abort_turn("s", "t")
    await other.append("s", adopted.session.epoch, "t", 1, [4])
    await other.complete_turn("s", adopted.session.epoch, "t", "stop")
    assert not await other.abort_turn("s", "t"), "it is done"
    assert (await other.load("s", "me")).tokens == ids(3, 4)


async def test_two_routers_race_for_a_session_and_one_turn_runs(connect: Connect) -> None:
    routers = [await connect() for _ in range(4)]

    async def run(journal: Journal, number: int) -> bool:
        try:
            record = await take(journal)
            await journal.begin_turn("s", record.epoch, f"t{number}", 0, ids(number), b"")
        except (SessionBusy, StaleEpoch):
            return False
        return True

    won = await asyncio.gather(*(run(journal, i) for i, journal in enumerate(routers)))
    assert sum(won) == 1, won


async def test_append_said_again_is_no_harm_and_other_tokens_are_refused(journal: Journal) -> None:
    await take(journal)
    await journal.begin_turn("s", 0, "t", 0, ids(1), b"")
    await journal.append("s", 0, "t", 1, [2, 3])
    await journal.append("s", 0, "t", 1, [2, 3])
    with pytest.raises(StaleEpoch, match="position 1 of session s has other tokens"):
        await journal.append("s", 0, "t", 1, [4, 3])
    await journal.append("s", 0, "t", 3, [5])
    await journal.complete_turn("s", 0, "t", "stop")
    assert (await journal.load("s", "me")).tokens == ids(1, 2, 3, 5)


async def test_a_fork_is_its_maker_s(journal: Journal, connect: Connect) -> None:
    await take(journal)
    await turn(journal, 0, ids(1, 2), [3])
    await journal.pin("s", 0, "w@1")
    child = await journal.fork("s", "me", "c", 2)
    assert (child.tokens, child.worker, child.epoch) == (ids(1, 2), "w@1", 1)
    assert (await take(journal, "c")).epoch == 1
    assert (await journal.fork("s", "me", "whole", None)).tokens == ids(1, 2, 3)
    with pytest.raises(InvalidRequest, match="has 3 tokens, cannot fork it at 4"):
        await journal.fork("s", "me", "d", 4)


# ---- Redis ------------------------------------------------------------------------------------------


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
        (("--appendonly", "no"), "process", "it needs appendonly yes"),
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


async def test_objects_are_kept_in_order_and_apart(journal: Journal, connect: Connect) -> None:
    await journal.put_objects("me", {"items/b/02": b"2", "items/b/10": b"10", "items/a/01": b"a", "response/r": b"r"})
    await journal.put_objects("me", {"items/b/02": b"two"})
    await journal.put_objects("you", {"items/b/03": b"not mine"})
    other = await connect()
    assert await other.list_objects("me", "items/b/") == [("items/b/02", b"two"), ("items/b/10", b"10")]
    assert await other.get_object("me", "response/r") == b"r"
    await other.delete_objects("me", ["items/b/02", "unknown"])
    assert await journal.list_objects("me", "items/b/") == [("items/b/10", b"10")]
    assert await journal.get_object("me", "items/b/02") is None
    assert await journal.list_objects("me", "nothing/") == []


async def test_owners_are_those_of_living_sessions(journal: Journal) -> None:
    for name in ("a", "b"):
        await take(journal, name)
        await journal.pin(name, 0, f"worker-of-{name}")
    await journal.release("b", "me")
    assert await journal.owners(["a", "b", "unknown"]) == {"a": ("worker-of-a", 1)}
    assert await journal.owners([]) == {}


async def test_a_tenant_has_so_many_sessions_and_no_more(connect: Connect) -> None:
    journal = await connect()
    journal._max_sessions = 2  # type: ignore[attr-defined]
    await take(journal, "a")
    await journal.fork("a", "me", "b", None)
    await take(journal, "a")
    for make in (take(journal, "c"), journal.fork("a", "me", "c", None)):
        with pytest.raises(TooManySessions, match="2 of your sessions are open"):
            await make
    await take(journal, "c", "you")
    await journal.release("a", "me")
    await take(journal, "d")


async def test_tombstones_go_when_no_retry_can_come_any_more(connect: Connect) -> None:
    journal = await connect()
    await take(journal, "kept")
    await take(journal, "s")
    journal._retention_s = 2 * LEASE_S  # type: ignore[attr-defined]
    await journal.release("s", "me")
    with pytest.raises(SessionReleased):
        await take(journal, "s")
    for _ in range(200):
        try:
            assert (await take(journal, "s")).epoch == 0
            break
        except SessionReleased:
            await asyncio.sleep(LEASE_S / 4)
    else:
        raise AssertionError("the tombstone stays for ever")
    assert (await journal.load("kept", "me")).epoch == 0
