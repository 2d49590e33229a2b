"""The journal in both implementations: turns, fencing, tombstones, objects, limits."""

from __future__ import annotations

import asyncio
import uuid
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import (
    JournalUnavailable,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    SessionReleased,
    StaleEpoch,
    TooManySessions,
)
from router.journal.interface import Fence, Journal
from tests.router.journal.records import LEASE_S, Connect, ids, take, turn


async def test_session_names_do_not_collide_with_keys(connect: Connect) -> None:
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


async def test_an_aborted_rewind_restores_what_it_cut(journal: Journal) -> None:
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


async def test_other_tenants_sessions_are_not_found(journal: Journal) -> None:
    await take(journal, "s", "me")
    for call in (journal.take("s", "you", create=False), journal.load("s", "you"), journal.release("s", "you")):
        with pytest.raises(SessionNotFound):
            await call
    with pytest.raises(SessionExists):
        await take(journal, "s", "you")
    assert await journal.list_sessions("you") == []
    with pytest.raises(SessionExists):
        await journal.fork("s", "me", "s", 0)


async def test_refused_write_leaves_its_group_alone(journal: Journal) -> None:
    await take(journal, "s", "me")
    results = await asyncio.gather(
        journal.pin("s", 0, "a"), journal.pin("s", 0, "b"), take(journal, "t", "me"), return_exceptions=True
    )
    assert results[0] == 1 and isinstance(results[1], StaleEpoch)
    assert (await journal.load("s", "me")).worker == "a"


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


async def test_append_is_idempotent_and_refuses_other_tokens(journal: Journal) -> None:
    await take(journal)
    await journal.begin_turn("s", 0, "t", 0, ids(1), b"")
    await journal.append("s", 0, "t", 1, [2, 3])
    await journal.append("s", 0, "t", 1, [2, 3])
    with pytest.raises(StaleEpoch, match="position 1 of session s has other tokens"):
        await journal.append("s", 0, "t", 1, [4, 3])
    await journal.append("s", 0, "t", 3, [5])
    await journal.complete_turn("s", 0, "t", "stop")
    assert (await journal.load("s", "me")).tokens == ids(1, 2, 3, 5)


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


async def test_a_fence_keeps_a_former_owner_from_writing_objects(journal: Journal, connect: Connect) -> None:
    other = await connect()
    mine = Fence("s", (await take(journal)).epoch)
    await journal.put_objects("me", {"a": b"1", "b": b"1"}, mine)
    theirs = Fence("s", (await take(other)).epoch)
    with pytest.raises(StaleEpoch):
        await journal.put_objects("me", {"a": b"2", "c": b"2"}, mine)
    await other.put_objects("me", {"b": b"3"}, theirs)
    assert await journal.list_objects("me", "a") == [("a", b"1")]
    assert await journal.get_object("me", "b") == b"3" and await journal.get_object("me", "c") is None
    await other.release("s", "me")
    with pytest.raises(SessionReleased):
        await other.put_objects("me", {"b": b"4"}, theirs)
    with pytest.raises(SessionNotFound):
        await other.put_objects("me", {"b": b"4"}, Fence("unknown", 0))


async def test_a_closed_journal_says_so(connect: Connect) -> None:
    """And connects to nothing again: a response's task may outlive its router."""
    journal = await connect()
    await take(journal)
    await journal.close()
    for late in (journal.load("s", "me"), journal.get_object("me", "a"), journal.put_objects("me", {"a": b"1"})):
        with pytest.raises(JournalUnavailable, match="closed"):
            await late


async def test_sessions_of_a_tenant_are_limited(connect: Connect) -> None:
    journal = await connect()
    getattr(journal, "_store", journal)._max_sessions = lambda tenant: 2
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
    getattr(journal, "_store", journal)._retention_s = 2 * LEASE_S
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
