"""A router's sessions: the journal's records, kept in memory while they are in use."""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from holdfast.errors import InvalidRequest, QueueFull, SessionBusy, StaleEpoch
from router.journal.interface import Journal, SessionRecord

T = TypeVar("T")
BUSY_POLL_S = 0.05
"""Pause between attempts to take a session whose turn runs on another router."""
ENDING_S = 0.25
"""How long a turn that does not queue waits for the one before it: that one's client may have left just now."""
RACE_PAUSE_S = 0.005
"""Upper bound of a random pause, so that two routers that race for a session do not stay in step."""
MAX_SESSIONS_IN_MEMORY = 4096
"""Idle sessions beyond this number are dropped, and loaded from the journal at their next turn."""


class Session:
    """One session. Only the holder of its lock changes it."""

    def __init__(self, record: SessionRecord) -> None:
        self.record = record
        self.busy = False
        self.waiters: list[asyncio.Future[None]] = []
        self.running_turn: str = ""
        self.kv_nodes: tuple[str, ...] = ()
        """Where its KV was before it was pinned to its worker; empty once a turn was completed there."""
        self.text: str | None = None
        """The tokens' text, including special tokens; None until it is needed."""

    @property
    def session_id(self) -> str:
        return self.record.session_id

    @property
    def tokens(self) -> array[int]:
        return self.record.tokens

    def renew(self, record: SessionRecord) -> None:
        """Replace the record by a newer one from the journal."""
        self.record = record
        self.text = None

    def cut(self, keep_len: int) -> None:
        """Drop the tokens from ``keep_len`` on."""
        if keep_len < len(self.tokens):
            del self.tokens[keep_len:]
            self.text = None

    def extend(self, ids: array[int], text: str | None) -> None:
        """Append ``ids``, and their ``text`` if the caller has it."""
        self.tokens.extend(ids)
        self.text = self.text + text if self.text is not None and text is not None else None

    def prefix_crc(self, length: int) -> int:
        """CRC-32 of the first ``length`` tokens' bytes."""
        return zlib.crc32(self.tokens[:length])


class Sessions:
    """Sessions by id, loaded from the journal on demand. Limits how many turns wait for each."""

    def __init__(self, journal: Journal, max_waiting: int, busy_wait_s: float) -> None:
        self._journal = journal
        self._busy_wait_s = busy_wait_s
        self._max_waiting = max_waiting
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._taking: dict[str, asyncio.Lock] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def get(self, session_id: str, tenant: str, *, create: bool, queue: bool = False) -> Session:
        """The session, taken over from the router that had it.

        Another router may take it over again at any time: see ``up_to_date``. Raises SessionNotFound (also
        for another tenant's session), SessionReleased, SessionBusy (after ``ENDING_S``, or ``busy_wait_s`` with
        ``queue``).
        """
        session = self._sessions.get(session_id)
        if session is None or session.record.tenant != tenant:
            session = await self._loaded(session_id, tenant, create=create, queue=queue)
        self._sessions.move_to_end(session_id)
        self._trim()
        return session

    async def _loaded(self, session_id: str, tenant: str, *, create: bool, queue: bool) -> Session:
        # One at a time: a second take would roll back a turn begun after the first.
        taking = self._taking.setdefault(session_id, asyncio.Lock())
        try:
            async with taking:
                session = self._sessions.get(session_id)
                if session is None or session.record.tenant != tenant:
                    record = await self._take(session_id, tenant, create=create, queue=queue)
                    session = self._sessions.setdefault(session_id, Session(record))
                return session
        finally:
            if not taking.locked():
                self._taking.pop(session_id, None)

    async def up_to_date(self, session: Session, attempt: Callable[[], Awaitable[T]], *, queue: bool) -> T:
        """The result of ``attempt`` on the session's current state.

        The first attempt uses the record in memory: most turns stay on their router, and need no read of
        the journal. If it fails as it can when another router has had the session since, the session is
        taken over again and the attempt repeated. Raises what the attempt raises, except StaleEpoch:
        SessionBusy if other routers keep taking the session for ``busy_wait_s``.
        """
        deadline, pause_s = time.monotonic() + self._busy_wait_s, 0.0
        while True:
            known = session.record
            try:
                return await attempt()
            except (StaleEpoch, InvalidRequest) as error:
                failure = error
            if time.monotonic() > deadline:
                raise SessionBusy(f"other routers keep taking over session {known.session_id}")
            await asyncio.sleep(random.uniform(0, pause_s))
            session.renew(await self._take(known.session_id, known.tenant, create=False, queue=queue))
            if session.record.epoch == known.epoch and isinstance(failure, InvalidRequest):
                raise failure  # no other router had the session
            pause_s = RACE_PAUSE_S

    async def _take(self, session_id: str, tenant: str, *, create: bool, queue: bool) -> SessionRecord:
        deadline = time.monotonic() + (self._busy_wait_s if queue else ENDING_S)
        while True:
            try:
                return await self._journal.take(session_id, tenant, create=create)
            except SessionBusy:
                # Its turn runs on another router, or on a lost one whose lease has not expired yet.
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(BUSY_POLL_S)

    def add(self, record: SessionRecord) -> Session:
        """A session that the journal has given to this router."""
        session = self._sessions[record.session_id] = Session(record)
        return session

    def forget(self, session_id: str) -> None:
        """Load the session from the journal at its next use."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            for waiter in session.waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def running_turn(self, session_id: str) -> str:
        """The id of the turn that runs on the session here; empty if there is none."""
        session = self._sessions.get(session_id)
        return session.running_turn if session is not None else ""

    @asynccontextmanager
    async def locked(self, session_id: str, tenant: str, *, create: bool, queue: bool) -> AsyncIterator[Session]:
        """The session, locked: one holder at a time, in order of arrival.

        Raises SessionBusy without ``queue`` once it has waited for ``ENDING_S``, QueueFull if too many wait, and as
        ``get``.
        """
        session = await self.lock(session_id, tenant, create=create, queue=queue)
        try:
            yield session
        finally:
            self.unlock(session)

    async def lock(self, session_id: str, tenant: str, *, create: bool, queue: bool) -> Session:
        """As ``locked``, for a holder that calls ``unlock`` itself."""
        while True:
            session = await self.get(session_id, tenant, create=create, queue=queue)
            if not session.busy and not session.waiters:
                break
            if queue and len(session.waiters) >= self._max_waiting:
                raise QueueFull(f"{len(session.waiters)} turns are waiting for session {session_id}")
            try:
                await self._wait(session, None if queue else ENDING_S)
            except TimeoutError:
                message = f"session {session_id} already has an active request; wait for it or abort it"
                raise SessionBusy(message) from None
            if self._sessions.get(session_id) is session:
                return session  # passed on by its last holder, still locked
        session.busy = True
        return session

    async def _wait(self, session: Session, timeout_s: float | None) -> None:
        """Until its holder passes the lock on. Raises TimeoutError."""
        waiter = asyncio.get_running_loop().create_future()
        session.waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except (TimeoutError, asyncio.CancelledError):
            if waiter in session.waiters:
                session.waiters.remove(waiter)
            elif waiter.done() and not waiter.cancelled() and session.busy:
                self.unlock(session)
            raise

    def lock_new(self, session: Session, turn_id: str) -> None:
        """Lock a session that was just added, for a turn."""
        session.busy, session.running_turn = True, turn_id

    def unlock(self, session: Session) -> None:
        """Pass the lock to the turn that has waited longest, if any."""
        session.running_turn = ""
        while session.waiters:
            waiter = session.waiters.pop(0)
            if not waiter.done():
                waiter.set_result(None)
                return
        session.busy = False

    def _trim(self) -> None:
        while len(self._sessions) > MAX_SESSIONS_IN_MEMORY:
            idle = next((s for s in self._sessions.values() if not s.busy and not s.waiters), None)
            if idle is None or idle is next(reversed(self._sessions.values())):
                return
            del self._sessions[idle.session_id]
