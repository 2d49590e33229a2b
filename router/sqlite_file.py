"""The SQLite journal's file: its tables, how it is opened, and what a crash left of its log."""

from __future__ import annotations

import logging
import sqlite3
import struct
from pathlib import Path

from holdfast.errors import ConfigError, JournalUnavailable

log = logging.getLogger("holdfast.router")
LOCK_TIMEOUT_S = 5.0
"""How long a write waits for other routers' transactions, each of some milliseconds."""
HEADER = struct.Struct(">8I")
FRAME = struct.Struct(">6I")
MAX_FAULTS_TOLD = 3
SCHEMA_VERSION = 3

SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    worker TEXT NOT NULL DEFAULT '',
    epoch INTEGER NOT NULL DEFAULT 0,
    num_turns INTEGER NOT NULL DEFAULT 0,
    released REAL NOT NULL DEFAULT 0,  -- when; 0: it is not
    turn_id TEXT NOT NULL DEFAULT '',
    turn_keep_len INTEGER NOT NULL DEFAULT 0,
    turn_prompt_len INTEGER NOT NULL DEFAULT 0,
    turn_request BLOB NOT NULL DEFAULT x'',
    last_turn_id TEXT NOT NULL DEFAULT '',
    last_prompt_len INTEGER NOT NULL DEFAULT 0,
    last_finish TEXT NOT NULL DEFAULT '',
    router TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS open_sessions ON sessions (tenant) WHERE NOT released;
CREATE INDEX IF NOT EXISTS tombstones ON sessions (released) WHERE released;
-- Leases, in seconds of this machine's clock.
CREATE TABLE IF NOT EXISTS routers (router TEXT PRIMARY KEY, expires REAL NOT NULL) WITHOUT ROWID;
-- The session as of its last good turn, and what its running turn adds after turn_keep_len. They
-- become one when the turn completes; an aborted turn is simply forgotten.
CREATE TABLE IF NOT EXISTS tokens (
    session_id TEXT NOT NULL, start INTEGER NOT NULL, ids BLOB NOT NULL,
    PRIMARY KEY (session_id, start)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects (
    tenant TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, PRIMARY KEY (tenant, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turn_tokens (
    session_id TEXT NOT NULL, start INTEGER NOT NULL, ids BLOB NOT NULL,
    PRIMARY KEY (session_id, start)
) WITHOUT ROWID;
"""


def open_file(path: Path, synchronous: str) -> sqlite3.Connection:
    """The journal's database, made if it is not there. ``synchronous``: SQLite's NORMAL or FULL.

    Raises ConfigError for a file that is damaged or another version's, JournalUnavailable if it cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = torn_frames(Path(f"{path}-wal"))
    if torn:
        log.warning("journal %s: %d pages past its last whole commit, of one that was never finished", path, torn)
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=LOCK_TIMEOUT_S)
        db.execute("PRAGMA journal_mode=WAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise ConfigError(f"journal_path: {path} is of another version of Holdfast; name a new file")
        # A log that was torn is cut to its last whole commit by SQLite; a damaged file is nobody's to mend.
        faults = [row[0] for row in db.execute(f"PRAGMA quick_check({MAX_FAULTS_TOLD})")]
        if faults != ["ok"]:
            raise ConfigError(f"journal_path: {path} is damaged; restore it, or name a new file: {faults}")
        db.execute(f"PRAGMA synchronous={synchronous}")
        db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise ConfigError(f"journal_path: {path} is damaged: {error}") from None
        raise JournalUnavailable(f"journal {path}: {error}") from error
    return db


def torn_frames(wal: Path) -> int:
    """Pages that a write-ahead log has past its last commit, or a part of one: what opening it cuts off.

    SQLite plays a log up to its last whole commit and says nothing of the rest; it is counted here to be
    reported. Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
    Frames of an earlier round, which SQLite writes over, bear another salt and do not count.
    """
    try:
        data = wal.read_bytes()
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
