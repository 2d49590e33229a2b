"""Migration of sessions between living workers: for a drain, for rebalancing, or ahead of a turn.

The KV is copied first, then the journal's pin moves under a new epoch (refused while a turn runs), then
the copy on the source is released. Whichever process dies in between, the session is complete where the
journal says it is; copies elsewhere are swept, and KV that was not copied is computed at the next turn.
A turn on a draining worker's session does not wait for the drain: its session is migrated first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.errors import HoldfastError, NoWorkerAvailable, SessionBusy, SessionNotFound
from holdfast.v1 import worker_pb2
from router.config import RouterConfig
from router.fleet.fleet import Fleet
from router.fleet.link import WorkerLink
from router.fleet.placement import plan_rebalance
from router.fleet.sweeper import Sweeper
from router.journal.interface import Journal
from router.metrics import Metrics

log = logging.getLogger("holdfast.router")
END_PATIENCE_S, END_POLL_S = 2.0, 0.05
"""What a router takes at most to journal the end of a turn that its worker has ended."""
MAX_CONCURRENT = 4
"""Concurrent migrations of a drain: enough to fill a link while each waits for the step logs."""


@dataclass(slots=True)
class DrainReport:
    """What happened to a drained worker's turns and sessions."""

    turns_preempted: int = 0
    """Turns that ran past the deadline and failed over to other workers."""
    sessions_migrated: int = 0
    """Sessions migrated with their KV."""
    sessions_left: int = 0
    """Sessions whose next turn computes their KV again."""
    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Migrator:
    """One router's migrations."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, journal: Journal, sweeper: Sweeper, metrics: Metrics
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._journal = journal
        self._sweeper = sweeper
        self._metrics = metrics

    async def drain(self, worker_id: str, timeout_s: float, *, stop: bool = False) -> dict[str, Any]:
        """Have a worker stop admitting turns, migrate its sessions, and end it with ``stop``.

        Turns that still run after ``timeout_s`` fail over to other workers. Raises WorkerNotFound.
        """
        source = self._fleet.worker(worker_id)
        report, began = DrainReport(), time.monotonic()
        draining = asyncio.create_task(source.drain(timeout_s, self._config.control_timeout_s))
        try:
            # Sessions that are idle now first: their next turns need not wait for the longest running turn.
            await self._migrate_all(source, report)
            report.turns_preempted = await draining
            await self._migrate_all(source, report, patience_s=END_PATIENCE_S)
        finally:
            draining.cancel()
        if stop:
            with contextlib.suppress(NoWorkerAvailable):  # it ended before its answer was here
                await source.stop(self._config.control_timeout_s)
        report.seconds = time.monotonic() - began
        log.warning("worker %s is drained: %s", source.name, report)
        return asdict(report)

    async def rebalance(self, max_sessions: int) -> int:
        """Migrate up to ``max_sessions`` idle sessions from the worker with most to the one with fewest."""
        links = {link.name: link for link in self._fleet.admitting()}
        plan = plan_rebalance([link.view(0) for link in links.values()])
        if plan is None:
            return 0
        source, target = links[plan.source], links[plan.target]
        report = DrainReport()
        pins = await self.pins(source)
        for session_id, epoch in pins[: min(plan.count, max_sessions)]:
            await self.migrate(session_id, epoch, source, target, report)
        self._sweeper.sweep(source)
        log.info("rebalanced from %s to %s: %s", source.name, target.name, report)
        return report.sessions_migrated

    async def migrate(
        self,
        session_id: str,
        epoch: int,
        source: WorkerLink,
        target: WorkerLink,
        report: DrainReport,
        *,
        patience_s: float = 0.0,
    ) -> None:
        """Migrate one idle session with its KV, or leave it where it is.

        ``patience_s``: of a session whose turn the worker has ended, and that is busy until its router says so.
        """
        try:
            copied = await self._copy_kv(session_id, epoch, source, target)
            await self._move(session_id, epoch, target, patience_s)
        except HoldfastError as error:
            self._not_migrated(session_id, target, error)
            # Without KV there is nothing to lose: as when its first turn was preempted, and is on its way elsewhere.
            report.sessions_left += not isinstance(error, SessionNotFound)
            self._sweeper.sweep(target)
            return
        self._metrics.migrations.labels("migrated").inc()
        report.sessions_migrated += 1
        report.pages += copied.pages
        report.bytes += copied.bytes

    async def prefetch(self, session_id: str, epoch: int, source: WorkerLink, target: WorkerLink) -> None:
        """Copy the KV of a session that is about to be pinned to ``target``; the rest is computed there."""
        try:
            await self._copy_kv(session_id, epoch, source, target)
        except HoldfastError as error:
            self._not_migrated(session_id, target, error)
        else:
            self._metrics.migrations.labels("migrated").inc()

    async def pins(self, source: WorkerLink) -> list[tuple[str, int]]:
        """The sessions with a slot on a worker that are pinned to it, with their epochs; oldest first."""
        session_ids, _ = await source.slots(self._config.control_timeout_s)
        owners = await self._journal.owners(session_ids)
        found = [(name, owners[name]) for name in session_ids if name in owners]
        return [(name, owner.epoch) for name, owner in found if owner.worker == source.name and not owner.released]

    async def _move(self, session_id: str, epoch: int, target: WorkerLink, patience_s: float) -> None:
        """Pin a session to ``target`` in the journal. Raises SessionBusy if a turn runs on it for ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                await self._journal.move(session_id, epoch, target.name)
                return
            except SessionBusy:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(END_POLL_S)

    async def _copy_kv(
        self, session_id: str, epoch: int, source: WorkerLink, target: WorkerLink
    ) -> worker_pb2.ImportResponse:
        timeout_s = self._config.control_timeout_s
        copied = await target.import_session(session_id, epoch, source.address.address, timeout_s)
        self._metrics.migration_bytes.inc(copied.bytes)
        return copied

    def _not_migrated(self, session_id: str, target: WorkerLink, error: HoldfastError) -> None:
        what = {"session_id": session_id}
        log.info("session %s is not migrated to %s: %s", session_id, target.name, error.message, extra=what)
        self._metrics.migrations.labels("refused").inc()

    async def _migrate_all(self, source: WorkerLink, report: DrainReport, *, patience_s: float = 0.0) -> None:
        """Migrate the idle sessions of a draining worker to the others. ``patience_s``: see ``migrate``."""
        report.sessions_left = 0
        deadline = time.monotonic() + self._config.migration_timeout_s
        try:
            pins = await self.pins(source)
        except HoldfastError as error:
            log.warning("cannot list the sessions of worker %s: %s", source.name, error.message)
            report.sessions_left = source.stats.sessions  # as far as is known
            return
        num_assigned: dict[str, int] = {}
        remaining = iter(pins)

        async def migrate_remaining() -> None:
            for session_id, epoch in remaining:
                targets = [target for target in self._fleet.admitting() if target is not source]
                if not targets or time.monotonic() > deadline or not source.alive:
                    report.sessions_left += 1
                    continue
                target = min(targets, key=lambda t: (t.stats.sessions + num_assigned.get(t.name, 0), t.name))
                num_assigned[target.name] = num_assigned.get(target.name, 0) + 1
                await self.migrate(session_id, epoch, source, target, report, patience_s=patience_s)

        await asyncio.gather(*(migrate_remaining() for _ in range(MAX_CONCURRENT)))
        self._sweeper.sweep(source)
