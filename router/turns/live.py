"""The turns that run or wait on one router, and the limits on their number."""

from __future__ import annotations

import time
from collections import Counter

from holdfast.errors import QueueFull, TooManyTokens
from router.access.keys import Keyring
from router.access.rates import TokenRates
from router.config import RouterConfig
from router.fleet.link import WorkerLink
from router.metrics import Metrics
from router.turns.turn import LiveTurn


class LiveTurns:
    """Live turns by id. A turn is counted from its admission, before it waits for its session, to its end."""

    def __init__(self, config: RouterConfig, keyring: Keyring, metrics: Metrics) -> None:
        self._config, self._keyring = config, keyring
        self._metrics = metrics
        self._turns: dict[tuple[str, str], LiveTurn] = {}
        """By tenant and id: two tenants may choose the same."""
        self._num_by_tenant: Counter[str] = Counter()
        self._spent = TokenRates()
        self.closing = False
        """The router is stopping: turns that do not end in time are left for another router to resume."""

    def refuse_full(self, tenant: str, *, background: bool = False) -> None:
        """Raises QueueFull if the router or the tenant has reached its limit; background turns have half of each."""
        total, share = self._num_by_tenant.total(), 2 if background else 1
        if total >= self._config.max_live_turns // share:
            self._metrics.rejected.inc()
            raise QueueFull(f"{total} turns are running or waiting on this router; retry later")
        if self._num_by_tenant[tenant] >= self._tenant_turns(tenant) // share:
            self._metrics.rejected.inc()
            raise QueueFull(f"{self._num_by_tenant[tenant]} of your turns are running or waiting; retry later")

    def refuse_spent(self, tenant: str) -> None:
        """Raises TooManyTokens if the tenant has used more than it may: it begins no turn now; those it has go on."""
        per_min = self._keyring.limits_of(tenant).tokens_per_min
        wait_s = self._spent.wait_s(tenant, per_min, time.monotonic()) if per_min is not None else 0.0
        if wait_s:
            self._metrics.rejected.inc()
            raise TooManyTokens(f"you may use {per_min} tokens a minute; retry in {wait_s:.0f} s", wait_s)

    def _tenant_turns(self, tenant: str) -> int:
        given = self._keyring.limits_of(tenant).max_turns or self._config.max_turns_per_tenant
        if given is not None:
            return given
        total = self._config.max_live_turns
        return total if self._keyring.num_tenants < 2 else -(-total // 2)

    @property
    def num_turns(self) -> int:
        """Turns that run or wait, of all tenants."""
        return self._num_by_tenant.total()

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
        self._turns[_key(turn)] = turn

    def remove(self, turn: LiveTurn) -> None:
        """The turn ended."""
        del self._turns[_key(turn)]
        tenant = turn.request.tenant
        per_min = self._keyring.limits_of(tenant).tokens_per_min
        if per_min is not None:
            self._spent.spend(tenant, len(turn.tokens) - turn.keep_len, per_min, time.monotonic())
        self.uncount(turn.request.tenant)

    def __len__(self) -> int:
        return len(self._turns)

    def has(self, tenant: str, turn_id: str) -> bool:
        """Whether a turn of the tenant has that id."""
        return (tenant, turn_id) in self._turns

    def ids(self, tenant: str | None = None) -> list[tuple[str, str]]:
        """Tenants and ids of the live turns; with ``tenant``, only that tenant's."""
        return [key for key in self._turns if tenant in (None, key[0])]

    def num_by_worker(self) -> Counter[WorkerLink | None]:
        """Turns by worker, from the moment they are placed."""
        return Counter(turn.link for turn in self._turns.values())

    def abort(self, tenant: str, turn_id: str) -> bool:
        """End a live turn with reason ``abort``. Returns whether there was one."""
        turn = self._turns.get((tenant, turn_id))
        if turn is not None:
            turn.abort()
        return turn is not None


def _key(turn: LiveTurn) -> tuple[str, str]:
    return turn.request.tenant, turn.request.turn_id
