"""Which of a cluster's supervisors acts: the one that has the lease in the journal.

Two never act at once: a supervisor that cannot prove its lease does nothing, and what one does that was stopped
between its proof and its act is refused by epoch (routers) or by name (processes).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from holdfast.errors import JournalUnavailable, StaleEpoch
from router.journal.supervision import LeaseStore

log = logging.getLogger("holdfast.cluster")
SUPERVISOR_LEASE_S = 5.0
"""A supervisor that does not renew its lease for this long is replaced. Turns do not wait for one."""
BEATS_PER_LEASE = 5
PAUSE_S = 0.5
"""Before a supervisor stands again, so that one which cannot lead does not spin."""


class Leadership:
    """One supervisor's hold on the lease. ``holder``: its name, which no other supervisor ever has."""

    def __init__(self, store: LeaseStore, holder: str, lease_s: float = SUPERVISOR_LEASE_S) -> None:
        self._store, self._holder, self._lease_s = store, holder, lease_s
        self._valid_until = float("-inf")
        self.epoch = 0
        """Of the lease that it had last."""

    @property
    def is_valid(self) -> bool:
        """Whether nobody else can have the lease now."""
        return time.monotonic() < self._valid_until

    def check(self) -> None:
        """Call before every act. Raises StaleEpoch."""
        if not self.is_valid:
            raise StaleEpoch(f"supervisor {self._holder} has lost its lease, of epoch {self.epoch}")

    async def acquire(self) -> None:
        """Returns when the lease is this supervisor's."""
        while True:
            asked_at = time.monotonic()
            try:
                epoch = await self._store.acquire(self._holder, self._lease_s)
            except JournalUnavailable as error:
                log.warning("supervisor %s cannot ask for the lease: %s", self._holder, error)
                epoch = None
            if epoch is not None:
                # The journal counts from later on: it never gives the lease away before.
                self.epoch, self._valid_until = epoch, asked_at + self._lease_s
                return
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)

    async def keep(self) -> None:
        """Renew the lease; returns when it is lost."""
        while self.is_valid:
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)
            asked_at = time.monotonic()
            try:
                if not await self._store.renew(self._holder, self._lease_s):
                    break
            except JournalUnavailable as error:
                log.warning("supervisor %s cannot renew its lease: %s", self._holder, error)
            else:
                self._valid_until = asked_at + self._lease_s
        self._valid_until = float("-inf")

    async def give_up(self) -> None:
        """Let another supervisor lead at once."""
        self._valid_until = float("-inf")
        await self._store.give_up(self._holder)


async def stand(leadership: Leadership, lead: Callable[[], Awaitable[None]]) -> None:
    """Be one of a cluster's supervisors, until cancelled: ``lead`` runs while it has the lease, again and again.

    ``lead`` is cancelled when the lease is lost. What it has started runs on, for the next leader to find.
    """
    while True:
        await leadership.acquire()
        log.info("this supervisor leads, with epoch %d", leadership.epoch)
        leading, keeping = asyncio.ensure_future(lead()), asyncio.create_task(leadership.keep())
        try:
            await asyncio.wait((leading, keeping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (leading, keeping):
                task.cancel()
            await asyncio.gather(leading, keeping, return_exceptions=True)
            for task in (leading, keeping):
                error = None if task.cancelled() else task.exception()
                if error is not None and not isinstance(error, StaleEpoch):
                    log.error("internal error of a supervisor; starting over", exc_info=error)
        log.warning("this supervisor leads no longer: epoch %d is over", leadership.epoch)
        await asyncio.sleep(PAUSE_S)
