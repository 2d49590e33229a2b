"""Copies on disk: files that are only appended to, and found again after any crash.

A record is a header, the copy's key and owner, and its bytes. Headers carry a checksum of their own, so what a crash
left of a record at the end of a file is recognized and cut. Bytes are checked when they are read. The oldest file goes
when there is no room. A copy that is deleted is overwritten where it lies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from zlib_ng.zlib_ng import crc32

from workers.store.copies import is_of_tenant

log = logging.getLogger("holdfast.store")
SEGMENT_BYTES = 256 * 1024 * 1024
HEADER = struct.Struct("<4sHHII")
"""Mark, lengths of key, owner and bytes, CRC-32 of the bytes; then CRC-32 of these, the key and the owner."""
CRC = struct.Struct("<I")
ALIVE, DEAD = b"HFkv", b"dead"
PREFIX = "segment-"
MAX_FOLDERS = 64


@dataclass(slots=True)
class _Record:
    segment: int
    offset: int
    """Of the header."""
    at: int
    """Of the bytes."""
    size: int
    crc: int
    owner: str
    is_shared: bool = False


class Segments:
    """Copies in a folder, at most ``num_bytes`` of them and their headers. For one thread at a time.

    Methods raise OSError where a disk fails; what was there stays.
    """

    def __init__(self, folder: Path, num_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Finds the copies that are there. Takes the first of ``folder/0``, ``folder/1``, ... that no process has."""
        self._num_bytes, self._segment_bytes = num_bytes, min(segment_bytes, max(1, num_bytes // 4))
        self._folder, self._lock = _take_folder(folder)
        self._files: dict[int, IO[bytes]] = {}
        self._sizes: dict[int, int] = {}
        self._records: dict[bytes, _Record] = {}
        self._by_owner: dict[str, set[bytes]] = {}
        self.counters: Counter[str] = Counter()
        for path in sorted(self._folder.glob(f"{PREFIX}*")):
            self._scan(int(path.name.removeprefix(PREFIX)), path)

    @property
    def num_bytes_used(self) -> int:
        return sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._lock.close()

    def append(self, key: bytes, owner: str, data: bytes | memoryview, crc: int) -> None:
        """Keep a copy, unless there is one of that key."""
        if key in self._records:
            return
        name = owner.encode()
        fields = HEADER.pack(ALIVE, len(key), len(name), len(data), crc) + key + name
        head = fields + CRC.pack(crc32(fields[len(ALIVE) :]))
        size = len(head) + len(data)
        if size > self._segment_bytes:
            return
        segment = self._segment_with_room(size)
        file, offset = self._files[segment], self._sizes[segment]
        try:
            file.seek(offset)
            for part in (head, data):
                if file.write(part) != len(part):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(offset)
            raise
        self._sizes[segment] = offset + size
        self._add(key, _Record(segment, offset, offset + len(head), len(data), crc, owner))
        self.counters["disk_stored"] += 1

    def read(self, key: bytes, owner: str) -> tuple[bytes, int, str] | None:
        """A copy's bytes, checksum and owner. None if there is none, or if it is damaged: then it is dropped."""
        record = self._records.get(key)
        if record is None:
            return None
        file = self._files[record.segment]
        file.seek(record.at)
        data = file.read(record.size)
        if len(data) != record.size or crc32(data) != record.crc:
            self.counters["disk_damaged"] += 1
            self._delete([key])
            return None
        record.is_shared |= record.owner != owner
        return data, record.crc, record.owner

    def release(self, owner: str) -> None:
        """Delete what only this session has used."""
        self._delete([key for key in self._by_owner.get(owner, ()) if not self._records[key].is_shared])

    def flush(self, tenant: str = "") -> None:
        """Delete all, or all of a tenant."""
        if tenant:
            self._delete([key for key, record in self._records.items() if is_of_tenant(record.owner, tenant)])
            return
        for segment in list(self._files):
            self._remove(segment)

    def owners(self) -> list[str]:
        """The sessions that copies were made for."""
        return list(self._by_owner)

    # ---- inside ----------------------------------------------------------------------------------

    def _scan(self, segment: int, path: Path) -> None:
        """Find the records of a file, and cut what is not whole at its end."""
        file = self._files[segment] = path.open("r+b", buffering=0)
        total, offset = os.fstat(file.fileno()).st_size, 0
        while offset + HEADER.size <= total:
            file.seek(offset)
            mark, key_len, owner_len, size, crc = HEADER.unpack(file.read(HEADER.size))
            names = file.read(key_len + owner_len + CRC.size)
            at = offset + HEADER.size + len(names)
            fields = HEADER.pack(mark, key_len, owner_len, size, crc)[len(ALIVE) :] + names[: -CRC.size]
            is_whole = len(names) == key_len + owner_len + CRC.size and at + size <= total
            if mark not in (ALIVE, DEAD) or not is_whole or CRC.pack(crc32(fields)) != names[-CRC.size :]:
                break
            if mark == ALIVE:
                owner = names[key_len : key_len + owner_len].decode(errors="replace")
                self._add(names[:key_len], _Record(segment, offset, at, size, crc, owner))
            offset = at + size
        if offset < total:
            log.warning("%s: %d bytes at its end are of no whole record, and are cut", path, total - offset)
            file.truncate(offset)
        self._sizes[segment] = offset

    def _segment_with_room(self, size: int) -> int:
        last = max(self._files, default=0)
        if not self._files or self._sizes[last] + size > self._segment_bytes:
            last += 1
            path = self._folder / f"{PREFIX}{last:08d}"
            self._files[last] = path.open("w+b", buffering=0)
            self._sizes[last] = 0
        while self.num_bytes_used + size > self._num_bytes and len(self._files) > 1:
            self._remove(min(self._files))
            self.counters["disk_evicted"] += 1
        return last

    def _remove(self, segment: int) -> None:
        for key in [key for key, record in self._records.items() if record.segment == segment]:
            self._forget(key)
        self._files.pop(segment).close()
        del self._sizes[segment]
        (self._folder / f"{PREFIX}{segment:08d}").unlink(missing_ok=True)

    def _delete(self, keys: list[bytes]) -> None:
        """Overwrite copies: nobody can read them any more, from the disk neither."""
        for key in keys:
            record = self._records[key]
            self._forget(key)
            file = self._files[record.segment]
            file.seek(record.offset)
            file.write(DEAD)
            file.seek(record.at)
            file.write(bytes(record.size))

    def _add(self, key: bytes, record: _Record) -> None:
        self._forget(key)  # of two in different files, the later one
        self._records[key] = record
        self._by_owner.setdefault(record.owner, set()).add(key)

    def _forget(self, key: bytes) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return
        owned = self._by_owner[record.owner]
        owned.discard(key)
        if not owned:
            del self._by_owner[record.owner]


def _take_folder(folder: Path) -> tuple[Path, IO[bytes]]:
    """Raises OSError if all are taken."""
    for number in range(MAX_FOLDERS):
        own = folder / str(number)
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (own / "lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return own, lock
    raise OSError(f"all of {folder}/0 to {folder}/{MAX_FOLDERS - 1} are in use")
