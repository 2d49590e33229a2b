"""Operations on sessions other than turns: open, release, free_tail, fork.

The journal is written first, then the worker is called: what the journal says holds, whatever happens
to the worker.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable

from holdfast.errors import DeadlineExceeded, HoldfastError, InvalidRequest, NoWorkerAvailable
from holdfast.names import scoped
from holdfast.v1 import session_pb2
from router.config import RouterConfig
from router.fleet.fleet import Fleet
from router.fleet.link import WorkerLink
from router.fleet.sweeper import Sweeper
from router.journal.interface import Journal, SessionRecord
from router.turns.live import LiveTurns
from router.turns.sessions import Sessions

log = logging.getLogger("holdfast.router")


class Control:
    """One router's control plane."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        journal: Journal,
        sessions: Sessions,
        live: LiveTurns,
        sweeper: Sweeper,
    ) -> None:
        self._timeout_s = config.control_timeout_s
        self._fleet = fleet
        self._journal = journal
        self._sessions = sessions
        self._live = live
        self._sweeper = sweeper

    async def open_session(self, session_id: str, tenant: str) -> SessionRecord:
        """Raises SessionReleased, SessionExists, TooManySessions."""
        session = await self._sessions.get(scoped(tenant, session_id or uuid.uuid4().hex), tenant, create=True)
        # Another router may have released the session, or run turns on it, since it was loaded.
        return await self._journal.load(session.session_id, tenant)

    async def load(self, session_id: str, tenant: str) -> SessionRecord:
        """A session as the journal has it. Raises SessionNotFound, SessionReleased."""
        return await self._journal.load(scoped(tenant, session_id), tenant)

    async def release(self, session_id: str, tenant: str, mode: int = session_pb2.RELEASE_MODE_NOW) -> int:
        """Write the tombstone, then free the worker's pages. Returns the number of pages freed.

        A running turn is ended first, or waited for. Raises SessionNotFound.
        """
        session_id = scoped(tenant, session_id)
        if mode == session_pb2.RELEASE_MODE_AFTER_TURN:
            async with self._sessions.locked(session_id, tenant, create=False, queue=True):
                record = await self._journal.release(session_id, tenant)
        else:
            record = await self._journal.release(session_id, tenant)
            self._live.abort(tenant, self._sessions.running_turn(session_id))
        self._sessions.forget(session_id)
        freed = await self._call_worker(
            record.worker,
            lambda link: link.release(session_id, record.epoch, session_pb2.RELEASE_MODE_NOW, self._timeout_s),
        )
        link = self._fleet.link(record.worker)
        if link is None or not link.alive:  # its node may have copies of the session's KV, which other workers see
            for other in self._fleet.alive():
                self._sweeper.sweep(other)
        return freed

    async def free_tail(self, session_id: str, tenant: str, keep_len: int) -> SessionRecord:
        """Cut an idle session to ``keep_len`` tokens. Raises SessionBusy, SessionNotFound, InvalidRequest."""
        session_id = scoped(tenant, session_id)
        async with self._sessions.locked(session_id, tenant, create=False, queue=False) as session:

            async def cut() -> None:
                if not 0 <= keep_len <= len(session.tokens):
                    raise InvalidRequest(f"keep_len: must be from 0 to {len(session.tokens)}, the session's length")
                await self._journal.cut(session_id, session.record.epoch, keep_len)

            await self._sessions.up_to_date(session, cut, queue=False)
            record = session.record
            session.cut(keep_len)
            await self._call_worker(
                record.worker, lambda link: link.free_tail(session_id, record.epoch, keep_len, self._timeout_s)
            )
            return record

    async def fork(self, session_id: str, tenant: str, child_id: str, at_len: int | None) -> SessionRecord:
        """A new session with the first ``at_len`` tokens of another, sharing its KV if it is on a worker.

        Raises SessionNotFound, SessionExists, InvalidRequest, TooManySessions.
        """
        session_id, child_id = scoped(tenant, session_id), scoped(tenant, child_id or uuid.uuid4().hex)
        record = await self._journal.fork(session_id, tenant, child_id, at_len)
        child = self._sessions.add(record).record
        link = self._fleet.link(child.worker)
        if link is not None:
            try:
                await link.fork(session_id, child.session_id, child.epoch, len(child.tokens), self._timeout_s)
            except HoldfastError as error:
                # The child's first turn computes the KV that it does not share.
                log.info("fork %s shares no KV: %s", child.session_id, error.message)
        return child

    async def _call_worker(self, worker: str, call: Callable[[WorkerLink], Awaitable[int]]) -> int:
        """Pages freed on a worker. 0 if the worker is lost, before or during the call: so are its pages."""
        link = self._fleet.link(worker)
        if link is None:
            return 0
        try:
            return await call(link)
        except NoWorkerAvailable as error:
            log.info("worker %s was lost before it answered: %s", worker, error.message)
            return 0
        except DeadlineExceeded:
            self._sweeper.sweep(link)
            raise
