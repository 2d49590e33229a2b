"""The SQLite journal: fencing, roll back, tombstones, group commit, a failing disk."""

from __future__ import annotations

import asyncio
import sqlite3
from array import array
from collections.abc import AsyncIterator
from pathlib import Path

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
)
from router.journal import SqliteJournal


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SqliteJournal]:
    journal = SqliteJournal(tmp_path / "j.db", "process")
    yield journal
    journal.close()


def ids(*values: int) -> array:
    return array("i", values)


async def turn(journal: SqliteJournal, keep: int, given: array, output: list[int], epoch: int = 0) -> None:
    await journal.begin_turn("s", epoch, "t", keep, given)
    for i, token in enumerate(output):
        await journal.append("s", epoch, "t", keep + len(given) + i, [token])
    await journal.complete_turn("s", epoch, "t")


async def test_turns_append_and_rewind(journal: SqliteJournal) -> None:
    await journal.open("s", "me")
    await turn(journal, 0, ids(1, 2), [3, 4])
    await turn(journal, 4, ids(5), [6])
    assert (await journal.load("s", "me")).tokens == ids(1, 2, 3, 4, 5, 6)
    await turn(journal, 3, ids(7), [8])
    record = await journal.load("s", "me")
    assert (record.tokens, record.num_turns) == (ids(1, 2, 3, 7, 8), 3)


async def test_aborted_rewind_brings_back_what_it_cut(journal: SqliteJournal) -> None:
    await journal.open("s", "me")
    await turn(journal, 0, ids(1, 2), [3, 4])
    await journal.begin_turn("s", 0, "t2", 1, ids(9))
    await journal.append("s", 0, "t2", 2, [10])
    await journal.abort_turn("s", "t2")
    await journal.abort_turn("s", "t2")
    assert (await journal.load("s", "me")).tokens == ids(1, 2, 3, 4)


async def test_stale_epoch_is_refused_everywhere(journal: SqliteJournal) -> None:
    await journal.open("s", "me")
    assert await journal.pin("s", 0, "w@1") == 1
    await journal.begin_turn("s", 1, "t", 0, ids(1))
    assert await journal.pin("s", 1, "w@2") == 2
    for stale in (
        journal.append("s", 1, "t", 1, [2]),
        journal.complete_turn("s", 1, "t"),
        journal.begin_turn("s", 1, "t2", 0, ids(1)),
        journal.cut("s", 1, 0),
        journal.pin("s", 1, "w@3"),
    ):
        with pytest.raises(StaleEpoch):
            await stale
    await journal.append("s", 2, "t", 1, [2])
    await journal.complete_turn("s", 2, "t")
    assert (await journal.load("s", "me")).tokens == ids(1, 2)


async def test_one_turn_at_a_time(journal: SqliteJournal) -> None:
    await journal.open("s", "me")
    await journal.begin_turn("s", 0, "t", 0, ids(1))
    with pytest.raises(SessionBusy):
        await journal.begin_turn("s", 0, "t2", 0, ids(1))
    with pytest.raises(SessionBusy):
        await journal.cut("s", 0, 0)


async def test_tombstone_outlives_everything(journal: SqliteJournal, tmp_path: Path) -> None:
    await journal.open("s", "me")
    await journal.begin_turn("s", 0, "t", 0, ids(1))
    first = await journal.release("s", "me")
    assert (await journal.release("s", "me")).epoch == first.epoch == 1
    for late in (journal.append("s", 0, "t", 1, [2]), journal.open("s", "me"), journal.pin("s", 1, "w")):
        with pytest.raises(SessionReleased):
            await late
    again = SqliteJournal(tmp_path / "j.db", "power")
    with pytest.raises(SessionReleased):
        await again.open("s", "me")
    again.close()


async def test_other_tenants_sessions_are_not_there(journal: SqliteJournal) -> None:
    record = await journal.open("s", "me")
    for call in (journal.open("s", "you"), journal.load("s", "you"), journal.release("s", "you")):
        with pytest.raises(SessionNotFound):
            await call
    assert await journal.list_sessions("you") == []
    with pytest.raises(SessionExists):
        await journal.fork(record, "s", 0)


async def test_concurrent_writes_share_commits(journal: SqliteJournal) -> None:
    await asyncio.gather(*(journal.open(f"s{i}", "me") for i in range(200)))
    assert journal.num_writes == 200
    assert journal.num_commits < 100, "group commit"


async def test_refused_write_leaves_its_group_alone(journal: SqliteJournal) -> None:
    await journal.open("s", "me")
    results = await asyncio.gather(
        journal.pin("s", 0, "a"), journal.pin("s", 0, "b"), journal.open("t", "me"), return_exceptions=True
    )
    assert results[0] == 1 and isinstance(results[1], StaleEpoch)
    assert (await journal.load("s", "me")).worker == "a"


async def test_bad_write_fails_alone(journal: SqliteJournal) -> None:
    await journal.open("s", "me")
    await journal.begin_turn("s", 0, "t", 0, ids(1))
    results = await asyncio.gather(
        journal.append("s", 0, "t", 0, [9]),  # a position that is taken: SQLite itself refuses it
        journal.append("s", 0, "t", 1, [2]),
        journal.open("other", "me"),
        return_exceptions=True,
    )
    assert isinstance(results[0], JournalUnavailable) and results[1] is None and results[2].session_id == "other"
    await journal.complete_turn("s", 0, "t")
    assert (await journal.load("s", "me")).tokens == ids(1, 2)


async def test_failing_disk_is_a_clear_error_and_service_returns(journal: SqliteJournal) -> None:
    await journal.open("s", "me")
    real = journal._db

    class Broken:
        in_transaction = False

        def execute(self, *args: object) -> None:
            raise sqlite3.OperationalError("disk I/O error")

    journal._db = Broken()  # type: ignore[assignment]
    with pytest.raises(JournalUnavailable, match="disk I/O error"):
        await journal.begin_turn("s", 0, "t", 0, ids(1))
    journal._db = real
    await turn(journal, 0, ids(1), [2])
    assert (await journal.load("s", "me")).tokens == ids(1, 2)


TURNS = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, 9), max_size=4), st.sampled_from(["ok", "abort", "cut"])),
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=TURNS)
async def test_journal_equals_a_list(tmp_path: Path, turns: list) -> None:
    path = tmp_path / "h.db"
    path.unlink(missing_ok=True)
    journal = SqliteJournal(path, "process")
    await journal.open("s", "me")
    model: list[int] = []
    for back, output, kind in turns:
        keep = max(0, len(model) - back)
        if kind == "cut":
            await journal.cut("s", 0, keep)
            del model[keep:]
            continue
        given = [77] if keep % 2 else []  # a turn may only say again what the session has
        await journal.begin_turn("s", 0, "t", keep, ids(*given))
        for i, token in enumerate(output):
            await journal.append("s", 0, "t", keep + len(given) + i, [token])
        if kind == "ok":
            await journal.complete_turn("s", 0, "t")
            model = [*model[:keep], *given, *output]
        else:
            await journal.abort_turn("s", "t")
    assert list((await journal.load("s", "me")).tokens) == model
    assert (await journal.list_sessions("me"))[0][1] == len(model)
    journal.close()
