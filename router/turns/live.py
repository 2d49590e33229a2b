"""The turns that run or wait on one router, and the limits on their number."""

from __future__ import annotations

from collections import Counter

from holdfast.errors import QueueFull
from router.config import RouterConfig
from router.fleet.link import WorkerLink
from router.metrics import Metrics
from router.turns.turn import LiveTurn


class LiveTurns:
    """Live turns by id. A turn is counted from its admission, before it waits for its session, to its end."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._turns: dict[str, LiveTurn] = {}
        self._num_by_tenant: Counter[str] = Counter()
        self.closing = False
        """The router is stopping: turns that do not end in time are left for another router to resume."""

    def refuse_full(self, tenant: str, *, background: bool = False) -> None:
        """Raises QueueFull if the router or the tenant has reached its limit; background turns have half of each."""
        total, share = self._num_by_tenant.total(), 2 if background else 1
        if total >= self._config.max_live_turns // share:
            self._metrics.rejected.inc()
            raise QueueFull(f"{total} turns are running or waiting on this router; retry later")
        if self._num_by_tenant[tenant] >= self._config.tenant_turns // share:
            self._metrics.rejected.inc()
            raise QueueFull(f"{self._num_by_tenant[tenant]} of your turns are running or waiting; retry later")

    def count(self, tenant: str) -> None:
        """Count a turn, before it waits for anything."""
        self._num_by_tenant[tenant] += 1

    def uncount(self, tenant: str) -> None:
        """A counted turn ended, or did not begin."""
        self._num_by_tenant[tenant] -= 1
        if not self._num_by_tenant[tenant]:
            del self._num_by_tenant[tenant]

    def add(self, turn: LiveTurn) -> None:
        """A counted turn is prepared."""
        self._turns[turn.request.turn_id] = turn

    def remove(self, turn: LiveTurn) -> None:
        """The turn ended."""
        del self._turns[turn.request.turn_id]
        self.uncount(turn.request.tenant)

    def __contains__(self, turn_id: str) -> bool:
        return turn_id in self._turns

    def ids(self, tenant: str | None = None) -> list[str]:
        """Ids of the live turns; with ``tenant``, only that tenant's."""
        return [turn_id for turn_id, turn in self._turns.items() if tenant in (None, turn.request.tenant)]

    def num_by_worker(self) -> Counter[WorkerLink | None]:
        """Turns by worker, from the moment they are placed."""
        return Counter(turn.link for turn in self._turns.values())

    def abort(self, turn_id: str) -> bool:
        """End a live turn with reason ``abort``. Returns whether there was one."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            turn.abort()
        return turn is not None
