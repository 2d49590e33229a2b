"""Where a turn runs: choose its worker, pin its session there, submit it, and fail it over."""

from __future__ import annotations

import asyncio
import logging
import time

from holdfast.errors import HoldfastError, NoWorkerAvailable
from holdfast.tokens import pack_tokens
from holdfast.v1 import worker_pb2
from router.access.keys import Keyring
from router.config import RouterConfig
from router.fleet.fleet import Fleet
from router.fleet.inbox import TurnInbox
from router.fleet.link import Home, WorkerLink
from router.fleet.migration import Migrator
from router.fleet.placement import Placement
from router.fleet.sweeper import Sweeper
from router.journal.interface import Journal
from router.metrics import Metrics
from router.turns.live import LiveTurns
from router.turns.sessions import Session
from router.turns.turn import LiveTurn

log = logging.getLogger("holdfast.router")
NO_WORKER_POLL_S = 0.02


class Dispatch:
    """Places and submits one router's turns."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        placement: Placement,
        journal: Journal,
        migrator: Migrator,
        sweeper: Sweeper,
        live: LiveTurns,
        keyring: Keyring,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._placement = placement
        self._journal = journal
        self._migrator = migrator
        self._sweeper = sweeper
        self._live = live
        self._keyring = keyring
        self._metrics = metrics

    async def place(self, turn: LiveTurn, *, repin: bool = False) -> None:
        """Give the turn a worker: the one its session is pinned to, or a new one under a new epoch.

        ``repin``: choose a new one in any case. Raises NoWorkerAvailable after ``worker_wait_s``.
        """
        pinned = self._fleet.link(turn.session.record.worker) if turn.session else None
        if pinned is not None and not pinned.stats.draining and not repin:
            turn.placed(pinned)
            return
        with turn.request.trace.step("place"):
            link = await self._choose(turn)
        turn.placed(link)
        if turn.session is not None:
            await self._pin(turn, turn.session, link)

    def submit(self, turn: LiveTurn, *, full: bool) -> TurnInbox:
        """Send the turn to its worker: only its new tokens if the worker should have the rest, else all."""
        session = turn.session
        delta = not full and session is not None and turn.keep_len > 0
        prefix_len = turn.keep_len if delta else 0
        submission = turn.new_submission()
        submit = worker_pb2.Submit(
            turn_id=submission,
            session_id=turn.slot_name,
            tenant=turn.request.tenant,
            epoch=turn.epoch,
            tokens=pack_tokens(turn.tokens[prefix_len:]),
            prefix_len=prefix_len,
            prefix_crc=session.prefix_crc(prefix_len) if session and delta else 0,
            prompt_len=turn.prompt_len,
            sampling=turn.sampling,
            ephemeral=session is None,
            kv_nodes=self._kv_nodes(turn, session, full=full),
            scope=self._keyring.scope_of(turn.request.tenant),
        )
        return turn.worker.submit(submit)

    async def fail_over(self, turn: LiveTurn) -> TurnInbox:
        """Continue a turn on another worker, from the tokens that the journal has."""
        lost, began = turn.worker.name, time.monotonic()
        turn.unplaced()
        turn.request.trace.leave()
        with turn.request.trace.step("fail over", lost=lost):
            await self.place(turn, repin=True)
        self._metrics.failovers.inc()
        inbox = self.submit(turn, full=True)
        turn.request.trace.enter("prefill")
        turn.resubmitted_at = time.monotonic()
        self._metrics.failover.labels("place").observe(turn.resubmitted_at - began)
        log.warning(
            "turn %s of session %s failed over from %s to %s at token %d in %.1f ms",
            turn.request.turn_id,
            turn.request.session_id or "-",
            lost,
            turn.worker.name,
            len(turn.tokens),
            1000 * (time.monotonic() - began),
            extra=turn.log_fields,
        )
        return inbox

    def completed(self, turn: LiveTurn) -> None:
        """Remember where the turn's tokens are cached, for turns that share a prefix."""
        request = turn.request
        if turn.session is not None:
            turn.session.kv_nodes = ()
        scope = self._keyring.scope_of(request.tenant).name
        self._placement.remember(turn.worker.name, scope, turn.tokens, request.cache_key)

    async def _pin(self, turn: LiveTurn, session: Session, link: WorkerLink) -> None:
        """Pin the session to a worker. KV on a previous worker that is alive is migrated."""
        record = session.record
        home, previous = await self._fleet.home(record.worker), self._fleet.link(record.worker)
        if previous is not None and previous is not link:
            with turn.request.trace.step("migrate", source=previous.name, target=link.name):
                await self._migrator.prefetch(session.session_id, turn.epoch, previous, link)
        try:
            record.epoch = turn.epoch = await self._journal.pin(session.session_id, turn.epoch, link.name)
        except HoldfastError:
            self._sweeper.sweep(link)
            raise
        session.kv_nodes = home.nodes
        turn.moved = bool(record.worker)
        record.worker = link.name
        if previous is not None and previous is not link:
            self._sweeper.sweep(previous)

    def _kv_nodes(self, turn: LiveTurn, session: Session | None, *, full: bool) -> tuple[str, ...]:
        """Where copies may be of KV that the turn's worker does not have."""
        if session is None:
            return ()
        return session.kv_nodes or (turn.worker.home.nodes if full else ())

    async def _choose(self, turn: LiveTurn) -> WorkerLink:
        deadline = time.monotonic() + self._config.worker_wait_s
        home = await self._fleet.home(turn.session.record.worker) if turn.session is not None else Home()
        request = turn.request
        while True:
            # The router's own count: it includes turns that are placed but not in a beat yet.
            load = self._live.num_by_worker()
            views = [link.view(load[link]) for link in self._fleet.admitting()]
            near = self._fleet.near(home)
            scope = self._keyring.scope_of(request.tenant).name
            name = self._placement.choose(views, scope, turn.tokens, request.cache_key, near)
            link = self._fleet.link(name) if name is not None else None
            if link is not None:
                return link
            if time.monotonic() >= deadline:
                raise NoWorkerAvailable(f"no worker became available within {self._config.worker_wait_s} s")
            await asyncio.sleep(NO_WORKER_POLL_S)
