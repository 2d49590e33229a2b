"""A journal with a torn or damaged end keeps everything up to its last complete commit."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from router.journal.sqlite import SqliteJournal

SESSIONS, TOKENS = 4, 40
FRAME_BYTES = 24 + 4096


async def written(folder: Path) -> Path:
    """A journal as a kill -9 leaves it: the file, and its log with all commits."""
    live, dead = folder / "live.db", folder / "dead.db"
    journal = SqliteJournal(live, "process")
    for i in range(SESSIONS):
        await journal.take(f"s{i}", "me", create=True)
        await journal.begin_turn(f"s{i}", 0, "t", 0, array("i", [i]), b"request")
    for n in range(TOKENS):
        await asyncio.gather(*(journal.append(f"s{i}", 0, "t", 1 + n, [100 * i + n]) for i in range(SESSIONS)))
    for suffix in ("", "-wal"):
        shutil.copy(f"{live}{suffix}", f"{dead}{suffix}")
    await journal.close()
    return dead


def log_size(path: Path) -> int:
    return os.path.getsize(f"{path}-wal")


async def read(path: Path) -> list[list[int]]:
    journal = SqliteJournal(path, "process")
    outputs = []
    try:
        for i in range(SESSIONS):
            try:
                turn = await journal.adopt_turn(f"s{i}", "me", "t")
                outputs.append(list(turn.tokens[1:]))
            except Exception:
                outputs.append([])  # not even its beginning is there
    finally:
        await journal.close()
    return outputs


async def test_a_torn_log_keeps_its_complete_commits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dead = await written(tmp_path)
    size = log_size(dead)
    whole = await read_copy(dead, tmp_path / "whole", lambda wal: wal)
    assert not caplog.text, "nothing is missing"
    assert whole == [[100 * i + n for n in range(TOKENS)] for i in range(SESSIONS)]
    rng, lengths = random.Random(1), []
    for number in range(20):
        kept = rng.randrange(size)
        torn = await read_copy(dead, tmp_path / f"torn{number}", lambda wal, kept=kept: wal[:kept])
        if (kept - 32) % FRAME_BYTES > 24 and kept > 32:
            assert "are discarded" in caplog.text, "what was cut is reported"
        caplog.clear()
        for ours, all_of_it in zip(torn, whole, strict=True):
            assert ours == all_of_it[: len(ours)], "a whole beginning, nothing else"
        lengths.append((kept, sum(map(len, torn))))
    lengths.sort()
    assert [length for _, length in lengths] == sorted(length for _, length in lengths), (
        "the more is left, the more is read"
    )
    assert lengths[-1][1] > 0


async def test_a_damaged_log_keeps_the_commits_before_the_damage(tmp_path: Path) -> None:
    dead = await written(tmp_path)
    size = log_size(dead)
    rng = random.Random(2)
    for number in range(20):
        at = rng.randrange(size)

        def spoil(wal: bytes, at: int = at) -> bytes:
            return wal[:at] + bytes([wal[at] ^ 0x40]) + wal[at + 1 :]

        for i, ours in enumerate(await read_copy(dead, tmp_path / f"spoiled{number}", spoil)):
            assert ours == [100 * i + n for n in range(len(ours))]


async def test_a_spoiled_file_is_refused_by_its_name(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "j.db", "process")
    for i in range(50):
        await journal.take(f"s{i}", "me", create=True)
    await journal.close()
    data = bytearray((tmp_path / "j.db").read_bytes())
    for at in range(4096, len(data), 512):
        data[at : at + 64] = bytes(64)
    (tmp_path / "j.db").write_bytes(data)
    with pytest.raises(ConfigError, match=r"journal_path: .*j\.db is damaged"):
        SqliteJournal(tmp_path / "j.db", "process")


async def read_copy(dead: Path, folder: Path, change: Callable[[bytes], bytes]) -> list[list[int]]:
    return await read(copied(dead, folder, change))


def copied(dead: Path, folder: Path, change: Callable[[bytes], bytes]) -> Path:
    folder.mkdir()
    shutil.copy(dead, folder / "j.db")
    (folder / "j.db-wal").write_bytes(change(Path(f"{dead}-wal").read_bytes()))
    return folder / "j.db"
