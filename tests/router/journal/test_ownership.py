"""Which router owns a session: leases, take-over, rollback, races."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.errors import (
    InvalidRequest,
    SessionBusy,
    SessionReleased,
    StaleEpoch,
)
from router.journal.interface import Journal, Owner
from router.journal.redis import RedisJournal
from router.journal.sqlite import SqliteJournal
from tests.router.journal.records import LEASE_S, Connect, ids, take, turn


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


async def test_a_living_router_s_turn_makes_its_session_busy(journal: Journal, connect: Connect) -> None:
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


async def test_a_dead_router_s_turn_is_rolled_back(journal: Journal, connect: Connect) -> None:
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


async def test_any_router_can_adopt_a_turn_that_was_left_open(journal: Journal, connect: Connect) -> None:
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
    assert (await journal.owners(["s"])) == {"s": Owner("w1@1", epoch + 1)}
    await journal.begin_turn("s", epoch + 1, "t2", 3, ids(4), b"")
    with pytest.raises(SessionBusy):
        await other.move("s", epoch + 1, "w2@1")
    await journal.release("s", "me")
    with pytest.raises(SessionReleased):
        await other.move("s", epoch + 1, "w2@1")


async def test_a_router_that_was_paused_cannot_roll_back_a_turn_that_another_adopted(
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


async def test_owners_are_those_of_known_sessions(journal: Journal) -> None:
    for name in ("a", "b"):
        await take(journal, name)
        await journal.pin(name, 0, f"worker-of-{name}")
    released = await journal.release("b", "me")
    assert await journal.owners(["a", "b", "unknown"]) == {
        "a": Owner("worker-of-a", 1),
        "b": Owner("worker-of-b", released.epoch, released=True),
    }
    assert await journal.owners([]) == {}
