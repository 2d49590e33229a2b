"""The SQLite journal's statements. Every method runs inside the caller's transaction."""

from __future__ import annotations

import sqlite3
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

from holdfast.errors import (
    InvalidRequest,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    SessionReleased,
    StaleEpoch,
    TooManySessions,
    TurnNotFound,
)
from router.journal.interface import Fence, Owner, SessionRecord, TurnRecord


class SessionRow(NamedTuple):
    """The columns that decide whether a write is allowed."""

    tenant: str
    worker: str
    epoch: int
    num_turns: int
    released: float
    turn_id: str
    turn_keep_len: int


class SqliteStore:
    """See ``Journal`` for what each method promises. Each checks before it writes: a refusal changes nothing."""

    def __init__(
        self,
        db: sqlite3.Connection,
        router: str,
        *,
        lease_s: float,
        max_sessions: Callable[[str], int],
        retention_s: float,
    ) -> None:
        self._db = db
        self.router = router
        self._lease_s = lease_s
        self._max_sessions = max_sessions
        self._retention_s = retention_s

    def _row(self, session_id: str) -> SessionRow:
        row = self._db.execute(
            "SELECT tenant, worker, epoch, num_turns, released, turn_id, turn_keep_len "
            "FROM sessions WHERE session_id = ?",
            (session_id,),
        ).fetchone()
        if row is None:
            raise SessionNotFound(f"session {session_id} does not exist")
        return SessionRow(*row)

    def _row_of_tenant(self, session_id: str, tenant: str) -> SessionRow:
        row = self._row(session_id)
        if row.tenant != tenant:
            raise SessionNotFound(f"session {session_id} does not exist")
        return row

    def _fenced(self, session_id: str, epoch: int) -> SessionRow:
        """Raises StaleEpoch, SessionReleased."""
        row = self._row(session_id)
        if row.released:
            raise SessionReleased(f"session {session_id} was released")
        if row.epoch != epoch:
            raise StaleEpoch(f"session {session_id} is at epoch {row.epoch}, epoch {epoch} has passed")
        return row

    def renew_lease(self) -> None:
        expires = time.time() + self._lease_s
        self._db.execute("INSERT OR REPLACE INTO routers VALUES (?, ?)", (self.router, expires))
        oldest = time.time() - self._retention_s
        self._db.execute("DELETE FROM sessions WHERE released AND released < ?", (oldest,))

    def drop_lease(self) -> None:
        self._db.execute("DELETE FROM routers WHERE router = ? OR expires < ?", (self.router, time.time()))

    def take(self, session_id: str, tenant: str, create: bool) -> SessionRecord:
        known = self._db.execute("SELECT tenant FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        if create and known and known[0] != tenant:
            raise SessionExists(f"session {session_id} belongs to another tenant; choose another id")
        if create and not known:
            self._refuse_too_many(tenant)
            self._db.execute(
                "INSERT INTO sessions (session_id, tenant, router) VALUES (?, ?, ?)",
                (session_id, tenant, self.router),
            )
        record, turn_id = self._own(session_id, tenant)
        if turn_id:
            self._drop_turn(session_id)
        return record

    def _refuse_too_many(self, tenant: str) -> None:
        row = self._db.execute("SELECT num_open FROM tenants WHERE tenant = ?", (tenant,)).fetchone()
        if row is not None and row[0] >= self._max_sessions(tenant):
            raise TooManySessions(f"{row[0]} of your sessions are open, which is the limit; release some")

    def _own(self, session_id: str, tenant: str) -> tuple[SessionRecord, str]:
        """Make the session this router's. Also returns the open turn, if the previous router left one."""
        record = self.load(session_id, tenant)
        router, turn_id = self._router_of(session_id), self._row(session_id).turn_id
        if router == self.router:
            return record, turn_id
        if turn_id and self._has_lease(router):
            raise SessionBusy(f"session {session_id} already has an active request, on another router")
        record.epoch += 1
        self._db.execute(
            "UPDATE sessions SET router = ?, epoch = ? WHERE session_id = ?", (self.router, record.epoch, session_id)
        )
        return record, turn_id

    def _router_of(self, session_id: str) -> str:
        row = self._db.execute("SELECT router FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        return str(row[0])

    def adopt_turn(self, session_id: str, tenant: str, turn_id: str) -> TurnRecord:
        self.load(session_id, tenant)
        open_turn, keep_len, prompt_len, request, last_turn, last_prompt_len, finish = self._db.execute(
            "SELECT turn_id, turn_keep_len, turn_prompt_len, turn_request, last_turn_id, last_prompt_len, last_finish "
            "FROM sessions WHERE session_id = ?",
            (session_id,),
        ).fetchone()
        if turn_id not in (open_turn, last_turn) or not turn_id:
            raise TurnNotFound(f"turn {turn_id} is neither running on session {session_id} nor its last")
        record, _ = self._own(session_id, tenant)
        if turn_id == last_turn:
            # The last turn's request is kept until another turn begins.
            output = record.tokens[last_prompt_len:]
            return TurnRecord(record, last_prompt_len, last_prompt_len, output, b"" if open_turn else request, finish)
        rows = self._db.execute("SELECT ids FROM turn_tokens WHERE session_id = ? ORDER BY start", (session_id,))
        tokens = array("i", b"".join(ids for (ids,) in rows))
        return TurnRecord(record, keep_len, prompt_len, tokens, request)

    def _has_lease(self, router: str) -> bool:
        row = self._db.execute("SELECT expires FROM routers WHERE router = ?", (router,)).fetchone()
        return row is not None and row[0] >= time.time()

    def load(self, session_id: str, tenant: str) -> SessionRecord:
        row = self._row_of_tenant(session_id, tenant)
        if row.released:
            raise SessionReleased(f"session {session_id} was released")
        record = SessionRecord(session_id, tenant, row.worker, row.epoch, row.num_turns)
        for (ids,) in self._db.execute("SELECT ids FROM tokens WHERE session_id = ? ORDER BY start", (session_id,)):
            record.tokens.frombytes(ids)
        return record

    def pin(self, session_id: str, epoch: int, worker: str) -> int:
        self._fenced(session_id, epoch)
        self._db.execute(
            "UPDATE sessions SET worker = ?, epoch = ? WHERE session_id = ?", (worker, epoch + 1, session_id)
        )
        return epoch + 1

    def move(self, session_id: str, epoch: int, worker: str) -> int:
        self._fenced_idle(session_id, epoch)
        return self.pin(session_id, epoch, worker)

    def _fenced_idle(self, session_id: str, epoch: int) -> None:
        """Raises SessionBusy, StaleEpoch, SessionReleased."""
        if self._fenced(session_id, epoch).turn_id:
            raise SessionBusy(f"session {session_id} already has an active request")

    def begin_turn(
        self, session_id: str, epoch: int, turn_id: str, keep_len: int, ids: array[int], request: bytes
    ) -> None:
        self._fenced_idle(session_id, epoch)
        self._db.execute(
            "UPDATE sessions SET turn_id = ?, turn_keep_len = ?, turn_prompt_len = ?, turn_request = ? "
            "WHERE session_id = ?",
            (turn_id, keep_len, keep_len + len(ids), request, session_id),
        )
        if ids:
            self._db.execute("INSERT INTO turn_tokens VALUES (?, ?, ?)", (session_id, keep_len, ids.tobytes()))

    def _fenced_turn(self, session_id: str, epoch: int, turn_id: str) -> SessionRow:
        """Raises StaleEpoch, SessionReleased."""
        row = self._fenced(session_id, epoch)
        if row.turn_id != turn_id:
            raise StaleEpoch(f"turn {turn_id} is not the running turn of session {session_id}")
        return row

    def append(self, session_id: str, epoch: int, turn_id: str, start: int, ids: list[int]) -> None:
        # The check and the write are one statement: each token of each turn comes here.
        new = array("i", ids).tobytes()
        added = self._db.execute(
            "INSERT INTO turn_tokens SELECT session_id, ?, ? FROM sessions "
            "WHERE session_id = ? AND epoch = ? AND turn_id = ? AND NOT released ON CONFLICT DO NOTHING",
            (start, new, session_id, epoch, turn_id),
        )
        if added.rowcount:
            return
        self._fenced_turn(session_id, epoch, turn_id)
        (known,) = self._db.execute(
            "SELECT ids FROM turn_tokens WHERE session_id = ? AND start = ?", (session_id, start)
        ).fetchone()
        if known != new:
            raise StaleEpoch(f"position {start} of session {session_id} has other tokens")

    def complete_turn(self, session_id: str, epoch: int, turn_id: str, finish: str) -> None:
        keep_len = self._fenced_turn(session_id, epoch, turn_id).turn_keep_len
        self._cut_tokens(session_id, keep_len)
        rows = self._db.execute("SELECT ids FROM turn_tokens WHERE session_id = ? ORDER BY start", (session_id,))
        ids = b"".join(row[0] for row in rows)
        if ids:
            self._db.execute("INSERT INTO tokens VALUES (?, ?, ?)", (session_id, keep_len, ids))
        self._db.execute(
            "UPDATE sessions SET num_turns = num_turns + 1, last_turn_id = ?, last_prompt_len = turn_prompt_len, "
            "last_finish = ? WHERE session_id = ?",
            (turn_id, finish, session_id),
        )
        self._drop_turn(session_id)

    def abort_turn(self, session_id: str, turn_id: str) -> bool:
        ours = self._row(session_id).turn_id == turn_id and self._router_of(session_id) == self.router
        if ours:
            self._drop_turn(session_id)
        return ours

    def leave_turn(self, session_id: str, turn_id: str) -> None:
        self._db.execute(
            "UPDATE sessions SET router = '' WHERE session_id = ? AND turn_id = ? AND router = ?",
            (session_id, turn_id, self.router),
        )

    def _drop_turn(self, session_id: str) -> None:
        self._db.execute("DELETE FROM turn_tokens WHERE session_id = ?", (session_id,))
        self._db.execute("UPDATE sessions SET turn_id = '' WHERE session_id = ?", (session_id,))

    def cut(self, session_id: str, epoch: int, keep_len: int) -> None:
        self._fenced_idle(session_id, epoch)
        self._cut_tokens(session_id, keep_len)
        self._db.execute("UPDATE sessions SET last_turn_id = '' WHERE session_id = ?", (session_id,))

    def _cut_tokens(self, session_id: str, keep_len: int) -> None:
        self._db.execute("DELETE FROM tokens WHERE session_id = ? AND start >= ?", (session_id, keep_len))
        self._db.execute(
            "UPDATE tokens SET ids = substr(ids, 1, 4 * (? - start)) "
            "WHERE session_id = ? AND start + length(ids) / 4 > ?",
            (keep_len, session_id, keep_len),
        )

    def fork(self, parent_id: str, tenant: str, child_id: str, at_len: int | None) -> SessionRecord:
        known = self.load(parent_id, tenant)
        at_len = len(known.tokens) if at_len is None else at_len
        if not 0 <= at_len <= len(known.tokens):
            raise InvalidRequest(f"session {parent_id} has {len(known.tokens)} tokens, cannot fork it at {at_len}")
        if self._db.execute("SELECT 1 FROM sessions WHERE session_id = ?", (child_id,)).fetchone():
            raise SessionExists(f"session {child_id} exists already")
        self._refuse_too_many(tenant)
        child = SessionRecord(child_id, known.tenant, known.worker, 1, 0, known.tokens[:at_len])
        self._db.execute(
            "INSERT INTO sessions (session_id, tenant, worker, epoch, router) VALUES (?, ?, ?, 1, ?)",
            (child_id, known.tenant, known.worker, self.router),
        )
        if at_len:
            self._db.execute("INSERT INTO tokens VALUES (?, 0, ?)", (child_id, child.tokens.tobytes()))
        return child

    def release(self, session_id: str, tenant: str) -> SessionRecord:
        row = self._row_of_tenant(session_id, tenant)
        epoch = row.epoch
        if not row.released:
            epoch += 1
            self._db.execute(
                "UPDATE sessions SET released = ?, epoch = ? WHERE session_id = ?", (time.time(), epoch, session_id)
            )
            self._db.execute("DELETE FROM tokens WHERE session_id = ?", (session_id,))
            self._drop_turn(session_id)
        return SessionRecord(session_id, tenant, row.worker, epoch, row.num_turns)

    def put_objects(self, tenant: str, objects: dict[str, bytes], fence: Fence | None = None) -> None:
        if fence is not None:
            self._fenced(*fence)
        rows = [(tenant, key, value) for key, value in objects.items()]
        self._db.executemany("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", rows)

    def get_object(self, tenant: str, key: str) -> bytes | None:
        row = self._db.execute("SELECT value FROM objects WHERE tenant = ? AND key = ?", (tenant, key)).fetchone()
        return row[0] if row is not None else None

    def list_objects(self, tenant: str, prefix: str) -> list[tuple[str, bytes]]:
        # The first key that does not begin with the prefix.
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        rows = self._db.execute(
            "SELECT key, value FROM objects WHERE tenant = ? AND key >= ? AND key < ? ORDER BY key",
            (tenant, prefix, end),
        )
        return list(rows)

    def delete_objects(self, tenant: str, keys: list[str]) -> None:
        self._db.executemany("DELETE FROM objects WHERE tenant = ? AND key = ?", [(tenant, key) for key in keys])

    def owners(self, session_ids: list[str]) -> dict[str, Owner]:
        found = {}
        for session_id in session_ids:
            row = self._db.execute(
                "SELECT worker, epoch, released FROM sessions WHERE session_id = ?", (session_id,)
            ).fetchone()
            if row is not None:
                found[session_id] = Owner(row[0], row[1], bool(row[2]))
        return found

    def list_sessions(self, tenant: str) -> list[tuple[SessionRecord, int, bool]]:
        rows = self._db.execute(
            "SELECT s.session_id, s.tenant, s.worker, s.epoch, s.num_turns, s.turn_id != '', "
            "(SELECT coalesce(sum(length(ids)) / 4, 0) FROM tokens t WHERE t.session_id = s.session_id) "
            "FROM sessions s WHERE NOT released AND tenant = ? ORDER BY s.session_id",
            (tenant,),
        )
        return [(SessionRecord(*row[:5]), row[6], bool(row[5])) for row in rows]
