"""Where turns are computed: found a worker, sent there, and sent elsewhere when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError, NoWorkerAvailable
from holdfast.tokens import pack_tokens
from holdfast.v1 import worker_pb2
from router.placement import Placement
from router.sessions import Session
from router.turns import LiveTurn
from router.workers import TurnInbox, WorkerLink

if TYPE_CHECKING:
    from router.gateway import Gateway

log = logging.getLogger("holdfast.router")


class Dispatch:
    """One router's placing and sending of turns."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.placement = Placement()

    async def place(self, turn: LiveTurn, *, move: bool = False) -> None:
        """Find the turn's worker: where its session is pinned, or (``move``: always) a place that is
        journaled under a new epoch."""
        pinned = self._gateway.link(turn.session.record.worker) if turn.session else None
        if pinned is not None and not pinned.stats.draining and not move:
            turn.link = pinned
            return
        turn.link = await self._choose(turn)
        if turn.session is not None:
            await self._pin(turn, turn.session, turn.link)

    async def _pin(self, turn: LiveTurn, session: Session, link: WorkerLink) -> None:
        """Make the session the worker's. From one that still lives, its KV comes along."""
        record, gateway = session.record, self._gateway
        left = gateway.link(record.worker)
        if left is not None and left is not link:
            await gateway.moves.bring(session.session_id, turn.epoch, left, link)
        try:
            record.epoch = turn.epoch = await gateway.journal.pin(session.session_id, turn.epoch, link.name)
        except HoldfastError:
            gateway.control.sweep(link)
            raise
        record.worker = link.name
        if left is not None and left is not link:
            gateway.control.sweep(left)

    async def _choose(self, turn: LiveTurn) -> WorkerLink:
        deadline = time.monotonic() + self._gateway.config.worker_wait_s
        while True:
            # Counted here, not by the link: a turn counts from the moment it is placed.
            load = Counter(live.link for live in self._gateway.turns.values())
            views = [link.view(load[link]) for link in self._gateway.alive_links() if not link.stats.draining]
            name = self.placement.choose(views, turn.request.tenant, turn.tokens, turn.request.cache_key)
            link = self._gateway.link(name) if name is not None else None
            if link is not None:
                return link
            if time.monotonic() >= deadline:
                raise NoWorkerAvailable(f"no worker came to life within {self._gateway.config.worker_wait_s} s")
            await asyncio.sleep(0.02)

    async def fail_over(self, turn: LiveTurn) -> TurnInbox:
        """The turn's worker is gone: give the session another owner and replay what the journal has."""
        assert turn.link is not None
        lost, began = turn.link.name, time.monotonic()
        turn.link = None
        await self.place(turn, move=True)
        assert turn.link is not None
        self._gateway.metrics.failovers.inc()
        inbox = self.submit(turn, full=True)
        turn.resubmitted_at = time.monotonic()
        self._gateway.metrics.failover.labels("place").observe(turn.resubmitted_at - began)
        log.warning(
            "turn %s of session %s moved from %s to %s at token %d in %.1f ms",
            turn.request.turn_id,
            turn.request.session_id or "-",
            lost,
            turn.link.name,
            len(turn.tokens),
            1000 * (time.monotonic() - began),
        )
        return inbox

    def submit(self, turn: LiveTurn, *, full: bool) -> TurnInbox:
        """Send the turn: only what is new if its worker should have the rest, else everything."""
        assert turn.link is not None
        session = turn.session
        delta = not full and session is not None and turn.keep_len > 0
        prefix_len = turn.keep_len if delta else 0
        turn.submission = f"{turn.request.turn_id}/{uuid.uuid4().hex}"
        submit = worker_pb2.Submit(
            turn_id=turn.submission,
            session_id=turn.key,
            tenant=turn.request.tenant,
            epoch=turn.epoch,
            tokens=pack_tokens(turn.tokens[prefix_len:]),
            prefix_len=prefix_len,
            prefix_crc=session.prefix_crc(prefix_len) if session and delta else 0,
            prompt_len=turn.prompt_len,
            sampling=turn.request.sampling,
            ephemeral=session is None,
        )
        return turn.link.submit(submit)
