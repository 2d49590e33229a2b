"""The journal: what every session is, durably. Tokens are shown only after it has them (law L10).

``Journal`` is one router's end of it. The sessions are one truth for all routers: each belongs to the
router that took it last, and to the worker it is pinned to; whenever either changes, its epoch grows.
Every write to a session carries the epoch, and a stale one is refused (law L11). Routers hold leases:
only what a living router runs is busy.

Two stores keep it: ``sqlite_journal`` (one file, one machine) and ``redis_journal`` (many machines).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

ROUTER_LEASE_S = 3.0
"""Silence after which a router's turns are anybody's. Beats come four times as often."""
BEATS_PER_LEASE = 4
MAX_SESSIONS_PER_TENANT = 100_000
TOMBSTONE_RETENTION_S = 7 * 24 * 3600.0
"""A released session's id stays gone for so long: far longer than any retry."""


@dataclass(slots=True)
class SessionRecord:
    """A session as the journal has it. ``worker`` names the pin: ``worker_id@incarnation``."""

    session_id: str
    tenant: str
    worker: str = ""
    epoch: int = 0
    num_turns: int = 0
    tokens: array[int] = field(default_factory=lambda: array("i"))


@dataclass(slots=True)
class TurnRecord:
    """A turn as the journal has it, and its session as of the last good turn."""

    session: SessionRecord
    keep_len: int
    prompt_len: int
    """Where the output starts, counted from the session's start."""
    tokens: array[int]
    """From ``keep_len`` on: the input, then the output so far."""
    request: bytes
    finish: str = ""
    """Why it ended; empty: it has not."""


class Journal(Protocol):
    """What a router needs of a journal. All may raise JournalUnavailable."""

    async def start(self) -> None:
        """Connect, and hold this router's lease. Raises ConfigError for a store that cannot keep its promise."""

    async def close(self) -> None:
        """Finish what is under way, and give the lease back."""

    async def take(self, session_id: str, tenant: str, *, create: bool) -> SessionRecord:
        """The session, as this router's from now on; it runs no turn on it.

        Another router's later writes to it are stale; a turn that was left open, by a dead router or by
        ``leave_turn``, is rolled back.
        Raises SessionBusy while a living router runs a turn on it, SessionNotFound if it is not to be created
        (also for another tenant's), SessionExists if it is and is another tenant's, SessionReleased,
        TooManySessions.
        """

    async def load(self, session_id: str, tenant: str) -> SessionRecord:
        """The session as it is, whoever has it. Raises SessionNotFound, SessionReleased."""

    async def pin(self, session_id: str, epoch: int, worker: str) -> int:
        """Give the session to ``worker`` if its epoch is still ``epoch``; returns the next one."""

    async def move(self, session_id: str, epoch: int, worker: str) -> int:
        """As ``pin``, for a session at rest, and by any router. Raises SessionBusy if a turn is open on it."""

    async def begin_turn(
        self, session_id: str, epoch: int, turn_id: str, keep_len: int, ids: array[int], request: bytes
    ) -> None:
        """A turn starts: the session's first ``keep_len`` tokens, then ``ids``. Raises SessionBusy.

        ``request``: whatever another router needs to go on with it.
        """

    async def adopt_turn(self, session_id: str, tenant: str, turn_id: str) -> TurnRecord:
        """The turn, as this router's from now on, with its session: that of a dead router, or of none.

        Also the session's last turn, ended: to be shown again. Raises as ``take``, and TurnNotFound.
        """

    async def append(self, session_id: str, epoch: int, turn_id: str, start: int, ids: list[int]) -> None:
        """Tokens of the running turn, from position ``start`` of the session on. The same again is no harm."""

    async def complete_turn(self, session_id: str, epoch: int, turn_id: str, finish: str) -> None:
        """The turn's tokens become the session's. ``finish``: why it ended."""

    async def abort_turn(self, session_id: str, turn_id: str) -> bool:
        """Back to the last good turn, if the turn runs and is this router's; returns whether it was.

        Not fenced by the epoch: whoever ends a turn may not know what became of its last pin.
        """

    async def leave_turn(self, session_id: str, turn_id: str) -> None:
        """If the turn runs and is this router's: nobody runs it any more. Any router may adopt it, or take the
        session and roll it back."""

    async def cut(self, session_id: str, epoch: int, keep_len: int) -> None:
        """Keep the first ``keep_len`` tokens. Raises SessionBusy."""

    async def fork(self, parent_id: str, tenant: str, child_id: str, at_len: int | None) -> SessionRecord:
        """A new session, this router's, with the parent's first ``at_len`` tokens (None: all), pin and tenant.

        Raises SessionNotFound, SessionReleased, SessionExists, InvalidRequest, TooManySessions.
        """

    async def release(self, session_id: str, tenant: str) -> SessionRecord:
        """Leave a tombstone; returns what the session was. Again: the same."""

    async def owners(self, session_ids: list[str]) -> dict[str, tuple[str, int]]:
        """Of each that is there and not released: its pin and its epoch, whosever it is."""

    async def put_objects(self, tenant: str, objects: dict[str, bytes]) -> None:
        """Keep what the APIs remember beside sessions (responses, conversations, their items), all or none.

        Keys are paths: ``list_objects`` finds those that begin alike.
        """

    async def get_object(self, tenant: str, key: str) -> bytes | None:
        """What was put last; None: nothing."""

    async def list_objects(self, tenant: str, prefix: str) -> list[tuple[str, bytes]]:
        """All whose keys begin with ``prefix``, in the order of their keys."""

    async def delete_objects(self, tenant: str, keys: list[str]) -> None:
        """Forget them. Unknown ones: nothing happens."""

    async def list_sessions(self, tenant: str) -> list[tuple[SessionRecord, int, bool]]:
        """The tenant's sessions, each with its length in tokens and whether a turn runs."""
