"""What SQLite's write-ahead log holds of commits that were never finished.

SQLite plays a log up to its last whole commit and says nothing of the rest; here it is counted, to be
reported. Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
"""

from __future__ import annotations

import struct
from pathlib import Path

HEADER = struct.Struct(">8I")
FRAME = struct.Struct(">6I")


def torn_frames(log: Path) -> int:
    """Pages that a log has past its last commit, or a part of one: what opening the database cuts off.

    Frames of an earlier round, which SQLite writes over, bear another salt and do not count.
    """
    try:
        data = log.read_bytes()
    except FileNotFoundError:
        return 0
    if len(data) < HEADER.size:
        return 0
    _, _, page_size, _, salt1, salt2, _, _ = HEADER.unpack_from(data)
    size, num_frames, committed = FRAME.size + page_size, 0, 0
    for at in range(HEADER.size, len(data) - FRAME.size + 1, size):
        _, commit_size, *salts, _, _ = FRAME.unpack_from(data, at)
        if salts != [salt1, salt2]:
            break
        num_frames += 1
        if commit_size and at + size <= len(data):
            committed = num_frames
    return num_frames - committed
