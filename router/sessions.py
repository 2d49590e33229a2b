"""A router's view of sessions: what the journal has, kept in memory while it is used."""

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
from router.journal import Journal, SessionRecord

T = TypeVar("T")
BUSY_POLL_S = 0.05
"""Between looks at a session whose turn runs on another router."""
RACE_PAUSE_S = 0.005
"""Random, up to this: two routers that race for a session must not keep step."""
MAX_SESSIONS_IN_MEMORY = 4096
"""Idle sessions beyond it are read from the journal again when they come back."""


class Session:
    """One session. Whoever changes it holds ``turn_slot``."""

    def __init__(self, record: SessionRecord) -> None:
        self.record = record
        self.busy = False
        self.waiters: list[asyncio.Future[None]] = []
        self.running_turn: str = ""
        self.text: str | None = None
        """The tokens' text, special tokens spelled out; None while nobody asked for it."""

    @property
    def session_id(self) -> str:
        return self.record.session_id

    @property
    def tokens(self) -> array[int]:
        return self.record.tokens

    def renew(self, record: SessionRecord) -> None:
        """It is something else now: the journal says so."""
        self.record = record
        self.text = None

    def cut(self, keep_len: int) -> None:
        if keep_len < len(self.tokens):
            del self.tokens[keep_len:]
            self.text = None

    def extend(self, ids: array[int], text: str | None) -> None:
        """``ids`` were added; ``text`` is theirs, if the caller has it."""
        self.tokens.extend(ids)
        self.text = self.text + text if self.text is not None and text is not None else None

    def prefix_crc(self, length: int) -> int:
        return zlib.crc32(self.tokens[:length])


class Sessions:
    """Sessions by id, loaded from the journal on demand; bounds how many turns wait on each."""

    def __init__(self, journal: Journal, max_waiting: int, busy_wait_s: float) -> None:
        self._journal = journal
        self._busy_wait_s = busy_wait_s
        self._max_waiting = max_waiting
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._taking: dict[str, asyncio.Lock] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    async def get(self, session_id: str, tenant: str, *, create: bool, queue: bool = False) -> Session:
        """The session, taken from whichever router had it.

        Another may take it again at any time: see ``up_to_date``. Raises SessionNotFound (also for another tenant's),
        SessionReleased, SessionBusy (with ``queue``: after ``busy_wait_s``).
        """
        session = self._sessions.get(session_id)
        if session is None or session.record.tenant != tenant:
            session = await self._loaded(session_id, tenant, create=create, queue=queue)
        self._sessions.move_to_end(session_id)
        self._trim()
        return session

    async def _loaded(self, session_id: str, tenant: str, *, create: bool, queue: bool) -> Session:
        # One at a time: a later one would roll back the turn that the first has begun by then.
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
        """What ``attempt`` gives for the session as it is now.

        It is tried on what this router knows. If that fails as it may when another router has had the
        session since, the session is taken again, and it is tried again: no look at the journal for the
        turns, which are nearly all, that stay with their router. Another may take it in turn before the
        attempt has got anywhere; whoever has it last wins. Raises what the attempt raises, but no StaleEpoch:
        SessionBusy where others had the session all through ``busy_wait_s``.
        """
        deadline, pause_s = time.monotonic() + self._busy_wait_s, 0.0
        while True:
            known = session.record
            try:
                return await attempt()
            except (StaleEpoch, InvalidRequest) as error:
                failure = error
            if time.monotonic() > deadline:
                raise SessionBusy(f"session {known.session_id} is taken again and again by other routers")
            await asyncio.sleep(random.uniform(0, pause_s))
            session.renew(await self._take(known.session_id, known.tenant, create=False, queue=queue))
            if session.record.epoch == known.epoch and isinstance(failure, InvalidRequest):
                raise failure  # of the session as it is: nobody else had it
            pause_s = RACE_PAUSE_S

    async def _take(self, session_id: str, tenant: str, *, create: bool, queue: bool) -> SessionRecord:
        deadline = time.monotonic() + self._busy_wait_s
        while True:
            try:
                return await self._journal.take(session_id, tenant, create=create)
            except SessionBusy:
                # Its turn runs on another router, or did, and that router's lease has not lapsed yet.
                if not queue or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(BUSY_POLL_S)

    def add(self, record: SessionRecord) -> Session:
        session = self._sessions[record.session_id] = Session(record)
        return session

    def forget(self, session_id: str) -> None:
        """Read it from the journal the next time."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            for waiter in session.waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def running_turn(self, session_id: str) -> str:
        session = self._sessions.get(session_id)
        return session.running_turn if session is not None else ""

    @asynccontextmanager
    async def turn_slot(self, session_id: str, tenant: str, *, create: bool, queue: bool) -> AsyncIterator[Session]:
        """The session, for one turn at a time, in order of arrival.

        Raises SessionBusy at once if ``queue`` is off, QueueFull if too many wait.
        """
        session = await self.take_slot(session_id, tenant, create=create, queue=queue)
        try:
            yield session
        finally:
            self.give_slot(session)

    async def take_slot(self, session_id: str, tenant: str, *, create: bool, queue: bool) -> Session:
        """As ``turn_slot``, for one whose end is elsewhere: see ``give_slot``."""
        while True:
            session = await self.get(session_id, tenant, create=create, queue=queue)
            if not session.busy and not session.waiters:
                break
            if not queue:
                raise SessionBusy(f"session {session_id} already has an active request; wait for it or abort it")
            if len(session.waiters) >= self._max_waiting:
                raise QueueFull(f"{len(session.waiters)} turns are waiting on session {session_id}")
            waiter = asyncio.get_running_loop().create_future()
            session.waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in session.waiters:
                    session.waiters.remove(waiter)
                elif waiter.done() and not waiter.cancelled() and session.busy:
                    self.give_slot(session)
                raise
            if self._sessions.get(session_id) is session:
                return session  # handed over: still busy, for us
        session.busy = True
        return session

    def give_slot(self, session: Session) -> None:
        """The slot goes to the turn that waits longest, if any."""
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
