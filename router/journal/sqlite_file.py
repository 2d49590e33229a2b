"""The SQLite journal's file: its schema, how it is opened, and what a crash left in its write-ahead log."""

from __future__ import annotations

import logging
import sqlite3
import struct
from pathlib import Path

from holdfast.errors import ConfigError, JournalUnavailable

log = logging.getLogger("holdfast.router")
LOCK_TIMEOUT_S = 5.0
"""How long a write waits for other routers' transactions, which take milliseconds."""
HEADER = struct.Struct(">8I")
FRAME = struct.Struct(">6I")
MAX_FAULTS_REPORTED = 3
SCHEMA_VERSION = 3

SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    worker TEXT NOT NULL DEFAULT '',
    epoch INTEGER NOT NULL DEFAULT 0,
    num_turns INTEGER NOT NULL DEFAULT 0,
    released REAL NOT NULL DEFAULT 0,  -- when; 0: not released
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
-- How many of them each tenant has: to count them took a journal's thread 5 ms at 100,000.
CREATE TABLE IF NOT EXISTS tenants (tenant TEXT PRIMARY KEY, num_open INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS session_opened AFTER INSERT ON sessions BEGIN
    INSERT INTO tenants VALUES (new.tenant, 1) ON CONFLICT DO UPDATE SET num_open = num_open + 1;
END;
CREATE TRIGGER IF NOT EXISTS session_released AFTER UPDATE OF released ON sessions
WHEN new.released AND NOT old.released BEGIN
    UPDATE tenants SET num_open = num_open - 1 WHERE tenant = new.tenant;
END;
DELETE FROM tenants;
INSERT INTO tenants SELECT tenant, count(*) FROM sessions WHERE NOT released GROUP BY tenant;
CREATE INDEX IF NOT EXISTS tombstones ON sessions (released) WHERE released;
-- Leases; expiry in seconds of this machine's clock.
CREATE TABLE IF NOT EXISTS routers (router TEXT PRIMARY KEY, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS supervisor (
    id INTEGER PRIMARY KEY, holder TEXT NOT NULL, epoch INTEGER NOT NULL, expires REAL NOT NULL
);
-- The session as of its last good turn. turn_tokens holds what its open turn adds after turn_keep_len:
-- it is merged when the turn completes, and deleted when the turn is aborted.
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
    """Open the journal's database, or create it. ``synchronous``: SQLite's NORMAL or FULL.

    Raises ConfigError for a path that cannot be written, and for a file that is damaged or of another
    version; JournalUnavailable if SQLite cannot open it now.
    """
    check_writable(path)
    torn = torn_frames(Path(f"{path}-wal"))
    if torn:
        log.warning("journal %s: %d pages after its last complete commit are discarded", path, torn)
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=LOCK_TIMEOUT_S)
        db.execute("PRAGMA journal_mode=WAL")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise ConfigError(f"journal_path: {path} is of another version of Holdfast; name a new file")
        # SQLite cuts a torn log to its last complete commit. A damaged file cannot be repaired.
        faults = [row[0] for row in db.execute(f"PRAGMA quick_check({MAX_FAULTS_REPORTED})")]
        if faults != ["ok"]:
            raise ConfigError(f"journal_path: {path} is damaged; restore it, or name a new file: {faults}")
        db.execute(f"PRAGMA synchronous={synchronous}")
        db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise ConfigError(f"journal_path: {path} is damaged: {error}") from None
        raise JournalUnavailable(f"journal {path}: {error}") from error
    return db


def check_writable(path: Path) -> None:
    """Create the file if it does not exist. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(f"journal_path: cannot write {path}: {error.strerror}") from None


def torn_frames(wal: Path) -> int:
    """The number of pages (or partial pages) in a write-ahead log after its last commit.

    SQLite replays a log up to its last complete commit and silently drops the rest, which is counted here
    for the log message. Format: https://www.sqlite.org/fileformat2.html#the_write_ahead_log
    Frames from before the last checkpoint have another salt and do not count.
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
