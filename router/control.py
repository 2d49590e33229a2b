"""What is done to sessions and workers beside their turns: open, release, cut, fork, sweep.

The journal comes first, the worker after it: what the journal has is so, whatever becomes of the worker.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from holdfast.errors import DeadlineExceeded, HoldfastError, InvalidRequest, NoWorkerAvailable
from holdfast.v1 import session_pb2
from router.journal import SessionRecord
from router.workers import WorkerLink

if TYPE_CHECKING:
    from router.gateway import Gateway

log = logging.getLogger("holdfast.router")
SWEEP_RETRY_S = 0.5
GONE = 2**62
"""The epoch under which a worker drops what no journal knows: later than any that it can have seen."""


class Control:
    """A router's control plane. One per gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sweeps: dict[str, asyncio.Task[None]] = {}

    async def open_session(self, session_id: str, tenant: str) -> SessionRecord:
        """Raises SessionReleased, SessionExists, TooManySessions."""
        session = await self._gateway.sessions.get(session_id or uuid.uuid4().hex, tenant, create=True)
        # What this router remembers may have been released, or gone on, by another.
        return await self._gateway.journal.load(session.session_id, tenant)

    async def release(self, session_id: str, tenant: str, mode: int = session_pb2.RELEASE_MODE_NOW) -> int:
        """Tombstone first, then free the worker's pages. Returns the pages freed.

        A running turn is ended first, or waited for. Raises SessionNotFound.
        """
        if mode == session_pb2.RELEASE_MODE_AFTER_TURN:
            async with self._gateway.sessions.turn_slot(session_id, tenant, create=False, queue=True):
                record = await self._gateway.journal.release(session_id, tenant)
        else:
            record = await self._gateway.journal.release(session_id, tenant)
            self._gateway.abort(self._gateway.sessions.running_turn(session_id))
        self._gateway.sessions.forget(session_id)
        return await self._unless_gone(record.worker, lambda link: self._drop(link, session_id, record.epoch))

    async def _drop(self, link: WorkerLink, session_id: str, epoch: int) -> int:
        return await link.release(
            session_id, epoch, session_pb2.RELEASE_MODE_NOW, self._gateway.config.control_timeout_s
        )

    def sweep(self, link: WorkerLink) -> None:
        """Have a worker free what it holds of sessions that are released, or another worker's, by now.

        For whenever it is reached (again), and whenever it may not have heard: law L12 holds on every
        rank that lives, also on one that was out of reach.
        """
        running = self._sweeps.get(link.name)
        self._sweeps[link.name] = asyncio.create_task(self._sweep(link, running))

    async def _sweep(self, link: WorkerLink, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            before.cancel()  # what it would have found, this one finds
        while link.alive:
            try:
                held = await link.slots(self._gateway.config.control_timeout_s)
                owners = await self._gateway.journal.owners(held)
                for session_id in held:
                    worker, epoch = owners.get(session_id, ("", GONE))
                    if worker != link.name:
                        await self._drop(link, session_id, epoch)
                break
            except HoldfastError as error:
                log.info("worker %s is not swept yet: %s", link.name, error.message)
            await asyncio.sleep(SWEEP_RETRY_S)
        if self._sweeps.get(link.name) is asyncio.current_task():
            del self._sweeps[link.name]

    async def close(self) -> None:
        for sweep in self._sweeps.values():
            sweep.cancel()
        await asyncio.gather(*self._sweeps.values(), return_exceptions=True)

    async def free_tail(self, session_id: str, tenant: str, keep_len: int) -> SessionRecord:
        """Cut an idle session. Raises SessionBusy, SessionNotFound, InvalidRequest."""
        async with self._gateway.sessions.turn_slot(session_id, tenant, create=False, queue=False) as session:

            async def cut() -> None:
                if not 0 <= keep_len <= len(session.tokens):
                    raise InvalidRequest(f"keep_len: must be from 0 to {len(session.tokens)}, the session's length")
                await self._gateway.journal.cut(session_id, session.record.epoch, keep_len)

            await self._gateway.sessions.up_to_date(session, cut, queue=False)
            record = session.record
            session.cut(keep_len)
            await self._unless_gone(
                record.worker,
                lambda link: link.free_tail(session_id, record.epoch, keep_len, self._gateway.config.control_timeout_s),
            )
            return record

    async def _unless_gone(self, worker: str, ask: Callable[[WorkerLink], Awaitable[int]]) -> int:
        """Pages freed on a worker. It is gone, or goes while it is asked: its pages died with it."""
        link = self._gateway.link(worker)
        if link is None:
            return 0
        try:
            return await ask(link)
        except NoWorkerAvailable as error:
            log.info("worker %s went before it answered: %s", worker, error.message)
            return 0
        except DeadlineExceeded:
            self.sweep(link)
            raise

    async def fork(self, session_id: str, tenant: str, child_id: str, at_len: int | None) -> SessionRecord:
        """A new session from the first ``at_len`` tokens of another, with its KV where that is shared."""
        record = await self._gateway.journal.fork(session_id, tenant, child_id or uuid.uuid4().hex, at_len)
        child = self._gateway.sessions.add(record).record
        link = self._gateway.link(child.worker)
        if link is not None:
            try:
                await link.fork(
                    session_id, child.session_id, child.epoch, len(child.tokens), self._gateway.config.control_timeout_s
                )
            except HoldfastError as error:
                # Only KV is not shared then: the child's first turn computes it.
                log.info("fork %s: no KV shared: %s", child.session_id, error.message)
        return child
