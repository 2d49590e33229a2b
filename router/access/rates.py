"""How many tokens tenants use a minute. Pure: the clock's readings are arguments."""

from __future__ import annotations

MINUTE_S = 60.0


class TokenRates:
    """A bucket for each tenant, of a minute's tokens. What a turn takes is known at its end: then a bucket may owe."""

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}
        """What was left, and when."""

    def wait_s(self, tenant: str, per_min: int, now_s: float) -> float:
        """How long until the tenant may begin a turn; 0: it may."""
        left = self._left(tenant, per_min, now_s)
        return 0.0 if left > 0 else (1 - left) * MINUTE_S / per_min

    def spend(self, tenant: str, num_tokens: int, per_min: int, now_s: float) -> None:
        """A turn of the tenant took so many."""
        self._buckets[tenant] = (self._left(tenant, per_min, now_s) - num_tokens, now_s)

    def _left(self, tenant: str, per_min: int, now_s: float) -> float:
        left, at_s = self._buckets.get(tenant, (float(per_min), now_s))
        return min(float(per_min), left + (now_s - at_s) * per_min / MINUTE_S)
