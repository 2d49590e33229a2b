"""The journal: the durable record of every session. Tokens are shown only after it has them (law L10).

``Journal`` is one router's connection to it. All routers share one record of a session: it belongs to
the router that took it last, and is pinned to one worker; its epoch grows whenever either changes.
Every write to a session carries the epoch, and a stale epoch is refused (law L11). Routers hold leases:
a session is busy only while a living router runs a turn on it.

There are two implementations: ``journal.sqlite`` (one file, one machine) and ``journal.redis`` (many
machines).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from holdfast.errors import ConfigError
from holdfast.names import shown

ROUTER_LEASE_S = 3.0
"""A router that does not renew its lease for this long loses its turns to any other router."""
BEATS_PER_LEASE = 4
MAX_SESSIONS_PER_TENANT = 100_000
TOMBSTONE_RETENTION_S = 7 * 24 * 3600.0
"""How long the id of a released session cannot be used again: far longer than any retry."""


class Owner(NamedTuple):
    """Where a session lives, under which epoch. ``worker`` is the pin; a released session's epoch is its last."""

    worker: str
    epoch: int
    released: bool = False


@dataclass(slots=True)
class SessionRecord:
    """A session in the journal. ``worker``: the pin, as ``worker_id@incarnation``."""

    session_id: str
    tenant: str
    worker: str = ""
    epoch: int = 0
    num_turns: int = 0
    tokens: array[int] = field(default_factory=lambda: array("i"))

    @property
    def shown_id(self) -> str:
        """What its tenant calls it."""
        return shown(self.session_id)


@dataclass(slots=True)
class TurnRecord:
    """A turn in the journal, and its session as of the last good turn."""

    session: SessionRecord
    keep_len: int
    prompt_len: int
    """Position of the first output token in the sequence."""
    tokens: array[int]
    """The sequence from ``keep_len`` on: the input, then the output so far."""
    request: bytes
    finish: str = ""
    """Why the turn ended; empty while it has not."""


class Fence(NamedTuple):
    """A write is refused once the session is at another epoch."""

    session_id: str
    epoch: int


class Journal(Protocol):
    """One router's connection to the journal. All methods may raise JournalUnavailable."""

    async def start(self) -> None:
        """Connect and acquire this router's lease. Raises ConfigError if the store cannot give the durability."""

    async def close(self) -> None:
        """Finish the writes in progress and give up the lease."""

    async def take(self, session_id: str, tenant: str, *, create: bool) -> SessionRecord:
        """Make the session this router's, without a running turn, and return it.

        Later writes by the router that had it are stale. A turn left open, by a lost router or by
        ``leave_turn``, is rolled back.
        Raises SessionBusy while a living router runs a turn on it, SessionReleased, TooManySessions; without
        ``create`` SessionNotFound (also for another tenant's session), with it SessionExists for that.
        """

    async def load(self, session_id: str, tenant: str) -> SessionRecord:
        """The session, whichever router has it. Raises SessionNotFound, SessionReleased."""

    async def pin(self, session_id: str, epoch: int, worker: str) -> int:
        """Pin the session to ``worker`` if its epoch is still ``epoch``. Returns the new epoch."""

    async def move(self, session_id: str, epoch: int, worker: str) -> int:
        """As ``pin``, for an idle session, by any router. Raises SessionBusy if it has an open turn."""

    async def begin_turn(
        self, session_id: str, epoch: int, turn_id: str, keep_len: int, ids: array[int], request: bytes
    ) -> None:
        """Begin a turn: the session's first ``keep_len`` tokens, then ``ids``. Raises SessionBusy.

        ``request``: what another router needs to resume the turn.
        """

    async def adopt_turn(self, session_id: str, tenant: str, turn_id: str) -> TurnRecord:
        """Make an open turn of a lost router, or of none, this router's, with its session.

        Also returns the session's last turn after it has ended. Raises as ``take``, and TurnNotFound.
        """

    async def append(self, session_id: str, epoch: int, turn_id: str, start: int, ids: list[int]) -> None:
        """Append tokens of the running turn, at position ``start`` of the sequence. Idempotent."""

    async def complete_turn(self, session_id: str, epoch: int, turn_id: str, finish: str) -> None:
        """Make the turn's tokens the session's. ``finish``: why the turn ended."""

    async def abort_turn(self, session_id: str, turn_id: str) -> bool:
        """Roll back to the last good turn if the turn is open and this router's. Returns whether it was.

        Not fenced by the epoch: the router may not know the result of its last ``pin``.
        """

    async def leave_turn(self, session_id: str, turn_id: str) -> None:
        """Give up a turn that is open and this router's: any router may adopt it, or take the session and roll
        the turn back."""

    async def cut(self, session_id: str, epoch: int, keep_len: int) -> None:
        """Keep the first ``keep_len`` tokens. Raises SessionBusy."""

    async def fork(self, parent_id: str, tenant: str, child_id: str, at_len: int | None) -> SessionRecord:
        """Create a session of this router with the parent's first ``at_len`` tokens (None: all), pin and tenant.

        Raises SessionNotFound, SessionReleased, SessionExists, InvalidRequest, TooManySessions.
        """

    async def release(self, session_id: str, tenant: str) -> SessionRecord:
        """Replace the session by a tombstone. Returns the session without its tokens. Idempotent."""

    async def owners(self, session_ids: list[str]) -> dict[str, Owner]:
        """Those of the sessions that the journal knows, of any tenant, released ones among them."""

    async def put_objects(self, tenant: str, objects: dict[str, bytes], fence: Fence | None = None) -> None:
        """Store what the APIs keep beside sessions (responses, files, batches), atomically.

        Keys are paths, so that ``list_objects`` finds those with a common prefix. With ``fence`` it raises
        SessionNotFound, SessionReleased, StaleEpoch.
        """

    async def get_object(self, tenant: str, key: str) -> bytes | None:
        """The value stored last; None if there is none."""

    async def list_objects(self, tenant: str, prefix: str) -> list[tuple[str, bytes]]:
        """All objects whose keys begin with ``prefix``, in key order."""

    async def delete_objects(self, tenant: str, keys: list[str]) -> None:
        """Delete objects. Unknown keys are ignored."""

    async def list_sessions(self, tenant: str) -> list[tuple[SessionRecord, int, bool]]:
        """The tenant's sessions, each with its length in tokens and whether it has an open turn."""


DURABILITIES = ("process", "power")
"""``process``: a shown token survives any kill -9. ``power``: it is also fsynced before it is shown."""


def check_durability(name: str) -> None:
    """Raises ConfigError."""
    if name not in DURABILITIES:
        raise ConfigError(f"journal_durability: {name!r} is not one of {', '.join(DURABILITIES)}")
