"""Copies on disk survive crashes whole or not at all, and what is deleted cannot be read from the disk."""

from __future__ import annotations

import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.store.segments import PREFIX, Segments

SEGMENT, NUM_BYTES = 1000, 4000


def data_of(key: int) -> bytes:
    return bytes([key]) * (40 + 13 * (key % 5))


def append(segments: Segments, key: int, owner: str) -> None:
    data = data_of(key)
    segments.append(bytes([key]), owner, data, zlib.crc32(data))


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 60), st.sampled_from("ab")),
        st.tuples(st.just("read"), st.integers(0, 60), st.sampled_from("abc")),
        st.tuples(st.just("release"), st.just(0), st.sampled_from("ab")),
        st.tuples(st.just("reopen"), st.just(0), st.just("")),
        st.tuples(st.just("crash"), st.integers(1, 90), st.just("")),
        st.tuples(st.just("flush"), st.just(0), st.just("")),
    ),
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(OPS)
def test_against_a_dictionary(ops: list[tuple[str, int, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        segments, gone = Segments(Path(folder), NUM_BYTES, SEGMENT), set[int]()
        owners: dict[int, set[str]] = {}
        for op, number, owner in ops:
            if op == "append":
                if bytes([number]) not in segments:
                    owners[number] = {owner}
                append(segments, number, owner)
                gone.discard(number)
                assert bytes([number]) in segments
            elif op == "read":
                found = segments.read(bytes([number]), owner)
                if found is not None:
                    assert found[:2] == (data_of(number), zlib.crc32(data_of(number))) and number not in gone
                    owners[number].add(owner)
            elif op == "release":
                alone = {key for key, users in owners.items() if users == {owner}}
                segments.release(owner)
                gone |= alone
            elif op == "flush":
                segments.flush()
                gone |= set(owners)
                assert not len(segments)
            else:
                segments.close()
                if op == "crash":  # the last bytes never reached the disk
                    path = max((Path(folder) / "0").glob(f"{PREFIX}*"), default=None)
                    if path is not None:
                        with path.open("r+b") as file:
                            file.truncate(max(0, path.stat().st_size - number))
                before = len(segments)
                segments = Segments(Path(folder), NUM_BYTES, SEGMENT)
                assert before - len(segments) in ((0, 1, 2) if op == "crash" else (0,))
                # Who used a copy besides its owner is not written down: a release deletes it then.
                owners = {key: {segments._records[bytes([key])].owner} for key in owners if bytes([key]) in segments}
            assert not any(bytes([key]) in segments for key in gone)
            used = sum(path.stat().st_size for path in (Path(folder) / "0").glob(f"{PREFIX}*"))
            assert used == segments.num_bytes_used <= NUM_BYTES
        segments.close()


def test_what_is_released_is_not_on_the_disk_any_more(tmp_path: Path) -> None:
    segments = Segments(tmp_path, NUM_BYTES, SEGMENT)
    for owner in "ab":
        append(segments, ord(owner), owner)
    segments.release("a")
    segments.close()
    (path,) = (tmp_path / "0").glob(f"{PREFIX}*")
    assert data_of(ord("a")) not in path.read_bytes() and data_of(ord("b")) in path.read_bytes()
    again = Segments(tmp_path, NUM_BYTES, SEGMENT)
    assert len(again) == 1 and again.read(b"b", "b") is not None
    again.close()


def test_a_flipped_bit_is_found_when_it_is_read(tmp_path: Path) -> None:
    segments = Segments(tmp_path, NUM_BYTES, SEGMENT)
    append(segments, 7, "a")
    append(segments, 8, "a")
    (path,) = (tmp_path / "0").glob(f"{PREFIX}*")
    content = bytearray(path.read_bytes())
    content[content.index(data_of(7)) + 3] ^= 16
    path.write_bytes(content)
    assert segments.read(b"\x07", "a") is None and segments.counters["disk_damaged"] == 1
    assert b"\x07" not in segments and segments.read(b"\x08", "a") is not None
    segments.close()


def test_a_full_disk_is_an_error_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = Segments(tmp_path, NUM_BYTES, SEGMENT)
    append(segments, 1, "a")
    file = segments._files[1]

    class Full:
        """Takes a part of what is written."""

        def __getattr__(self, name: str) -> object:
            return getattr(file, name)

        def write(self, data: bytes) -> int:
            return file.write(data[: len(data) // 2])

    segments._files[1] = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        append(segments, 2, "a")
    segments._files[1] = file
    append(segments, 3, "a")
    segments.close()
    again = Segments(tmp_path, NUM_BYTES, SEGMENT)
    assert [bytes([key]) in again for key in (1, 2, 3)] == [True, False, True]
    again.close()


def test_two_processes_have_folders_of_their_own(tmp_path: Path) -> None:
    one, other = Segments(tmp_path, NUM_BYTES, SEGMENT), Segments(tmp_path, NUM_BYTES, SEGMENT)
    append(one, 1, "a")
    assert len(other) == 0
    one.close()
    third = Segments(tmp_path, NUM_BYTES, SEGMENT)
    assert len(third) == 1
    for each in (other, third):
        each.close()
