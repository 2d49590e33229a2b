"""Sessions that move while nothing is wrong: a worker is drained, or sheds what it has too much of.

KV first, then the journal's pin under a new epoch (refused while a turn runs), then the copy that is
left behind is dropped. Whatever dies in between, the session is whole where the journal says it is; what
another worker holds of it is swept, and what did not come is computed again at the next turn. A turn that
comes for a session of a worker that drains does not wait for all that: its session's KV is brought first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError, WorkerNotFound
from holdfast.v1 import worker_pb2
from router.placement import shed
from router.workers import WorkerLink

if TYPE_CHECKING:
    from router.gateway import Gateway

log = logging.getLogger("holdfast.router")
MAX_AT_ONCE = 4
"""Hand-overs of one drain: enough to fill a link while each waits for its step log."""


@dataclass(slots=True)
class Moved:
    """What became of the sessions of a worker."""

    turns_moved: int = 0
    """Turned away at the deadline: they went on elsewhere."""
    sessions_moved: int = 0
    """With their KV."""
    sessions_left: int = 0
    """Without: their next turn computes it again."""
    pages: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Moves:
    """Those of one router."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def drain(self, worker_id: str, timeout_s: float, *, stop: bool = False) -> dict[str, Any]:
        """Have a worker take no more turns, move its sessions, and (``stop``) end it.

        Turns that run for longer than ``timeout_s`` go on elsewhere. Raises WorkerNotFound.
        """
        links = self._gateway.alive_links()
        source = next((link for link in links if link.address.worker_id == worker_id), None)
        if source is None:
            there = ", ".join(sorted(link.address.worker_id for link in links))
            raise WorkerNotFound(f"no worker {worker_id} is alive; there are: {there or 'none'}")
        config, moved, began = self._gateway.config, Moved(), time.monotonic()
        draining = asyncio.create_task(source.drain(timeout_s, config.control_timeout_s))
        try:
            # First those that are idle now: their next turns need not wait for the longest that runs.
            await self._move_all(source, moved)
            moved.turns_moved = await draining
            await self._move_all(source, moved)
        finally:
            draining.cancel()
        if stop:
            await source.stop(config.control_timeout_s)
        moved.seconds = time.monotonic() - began
        log.warning("worker %s is drained: %s", source.name, moved)
        return asdict(moved)

    async def rebalance(self, max_moves: int) -> int:
        """Move idle sessions, at most ``max_moves``, from the worker with most to the one with fewest."""
        links = {link.name: link for link in self._gateway.alive_links() if not link.stats.draining}
        wanted = shed([link.view(0) for link in links.values()])
        if wanted is None:
            return 0
        source, target = links[wanted.source], links[wanted.target]
        moved = Moved()
        pins = await self.pins(source)
        for session_id, epoch in pins[: min(wanted.count, max_moves)]:
            await self.hand_over(session_id, epoch, source, target, moved)
        self._gateway.control.sweep(source)
        log.info("%s sheds sessions to %s: %s", source.name, target.name, moved)
        return moved.sessions_moved

    async def hand_over(
        self, session_id: str, epoch: int, source: WorkerLink, target: WorkerLink, moved: Moved
    ) -> None:
        """Move one idle session with its KV, or leave it as it is."""
        try:
            taken = await self._take_over(session_id, epoch, source, target)
            await self._gateway.journal.move(session_id, epoch, target.name)
        except HoldfastError as error:
            self._left(session_id, target, error)
            moved.sessions_left += 1
            self._gateway.control.sweep(target)
            return
        self._gateway.metrics.handovers.labels("moved").inc()
        moved.sessions_moved += 1
        moved.pages += taken.pages
        moved.bytes += taken.bytes

    async def bring(self, session_id: str, epoch: int, source: WorkerLink, target: WorkerLink) -> None:
        """Have ``target`` read the KV of a session that is about to be its own; what does not come, it computes."""
        try:
            await self._take_over(session_id, epoch, source, target)
        except HoldfastError as error:
            self._left(session_id, target, error)
        else:
            self._gateway.metrics.handovers.labels("moved").inc()

    async def _take_over(
        self, session_id: str, epoch: int, source: WorkerLink, target: WorkerLink
    ) -> worker_pb2.ImportResponse:
        timeout_s = self._gateway.config.control_timeout_s
        taken = await target.take_over(session_id, epoch, source.address.address, timeout_s)
        self._gateway.metrics.handover_bytes.inc(taken.bytes)
        return taken

    def _left(self, session_id: str, target: WorkerLink, error: HoldfastError) -> None:
        log.info("session %s does not move to %s: %s", session_id, target.name, error.message)
        self._gateway.metrics.handovers.labels("left").inc()

    async def _move_all(self, source: WorkerLink, moved: Moved) -> None:
        """What is idle on a worker that drains, to the others."""
        moved.sessions_left = 0
        deadline = time.monotonic() + self._gateway.config.handover_timeout_s
        try:
            pins = await self.pins(source)
        except HoldfastError as error:
            log.warning("what worker %s holds is not known: %s", source.name, error.message)
            return
        given: dict[str, int] = {}
        waiting = iter(pins)

        async def mover() -> None:
            for session_id, epoch in waiting:
                targets = [t for t in self._gateway.alive_links() if t is not source and not t.stats.draining]
                if not targets or time.monotonic() > deadline or not source.alive:
                    moved.sessions_left += 1
                    continue
                target = min(targets, key=lambda t: (t.stats.sessions + given.get(t.name, 0), t.name))
                given[target.name] = given.get(target.name, 0) + 1
                await self.hand_over(session_id, epoch, source, target, moved)

        await asyncio.gather(*(mover() for _ in range(MAX_AT_ONCE)))
        self._gateway.control.sweep(source)

    async def pins(self, source: WorkerLink) -> list[tuple[str, int]]:
        """The sessions that are a worker's, of those it holds slots of, with their epochs; oldest first."""
        held = await source.slots(self._gateway.config.control_timeout_s)
        owners = await self._gateway.journal.owners(held)
        return [(name, owners[name][1]) for name in held if name in owners and owners[name][0] == source.name]
