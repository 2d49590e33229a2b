"""KV scopes: whose sessions share prefixes, and how much of the pages they may keep from others.

A scope is a tenant, or tenants that agreed to share. Its share of a pool is a guarantee to the others, not a wall.
Beyond its share a scope uses pages that are free, evicts nobody but itself, and is evicted before anybody else. Within
its share it evicts what others hold beyond theirs, then the least recently used. A scope without a share is never
beyond it. (Idle capacity is lent out as in Waldspurger, "Memory Resource Management in VMware ESX Server", OSDI 2002.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.errors import OutOfPages

WHOLE_PPM = 1_000_000


class KVScope(NamedTuple):
    """A session's scope by name, and its share of each pool in millionths; 0: no limit.

    Without a name it is the tenant's own.
    """

    name: str = ""
    share_ppm: int = 0

    def named_by(self, tenant: str) -> KVScope:
        """The same with a name: a tenant's own scope has the tenant's."""
        return self if self.name else self._replace(name=tenant)


OWN_SCOPE = KVScope()


class OutOfShare(OutOfPages):
    """The scope holds its share of a pool, and no page is free beyond it. Other scopes' turns may have room."""


@dataclass(slots=True, eq=False)
class ScopePages:
    """The pages of one group's pool that are charged to one scope: those that its sessions took from the free list."""

    limit: int
    num_charged: int = 0
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Those that only the prefix index holds, in the order in which the pool evicts them."""

    @property
    def excess(self) -> int:
        """How many are beyond the share; negative within it."""
        return self.num_charged - self.limit


class Scopes:
    """The scopes that have, or had, a share, each with its pages by group. ``num_pages``: of the groups' pools."""

    def __init__(self, num_pages: Sequence[int]) -> None:
        self._num_pages = tuple(num_pages)
        self._shares: dict[str, int] = {}
        self.pages: dict[str, list[ScopePages]] = {}

    def __bool__(self) -> bool:
        return bool(self.pages)

    def named(self, name: str) -> KVScope:
        """A scope with the share that it has now."""
        return KVScope(name, self._shares.get(name, 0))

    def is_new(self, scope: KVScope) -> bool:
        """Whether ``set_share`` would change anything."""
        return self._shares.get(scope.name, 0) != scope.share_ppm

    def set_share(self, scope: KVScope) -> bool:
        """Whether the scope has a share for the first time: what it holds already must be charged to it."""
        self._shares[scope.name] = scope.share_ppm
        limits = [limit_pages(num_pages, scope.share_ppm) for num_pages in self._num_pages]
        known = self.pages.get(scope.name)
        if known is None:
            self.pages[scope.name] = [ScopePages(limit) for limit in limits]
            return True
        for pages, limit in zip(known, limits, strict=True):
            pages.limit = limit
        return False

    def of(self, name: str) -> Sequence[ScopePages | None]:
        """A scope's pages by group; None for one that never had a share."""
        return self.pages.get(name) or [None] * len(self._num_pages)

    def over(self, group: int) -> Iterable[ScopePages]:
        """The pages of the scopes that are beyond their share of a group."""
        return [pages[group] for pages in self.pages.values() if pages[group].excess > 0]


def limit_pages(num_pages: int, share_ppm: int) -> int:
    """The pages of a pool that are a share of it: at least one, and all without a share."""
    return max(1, num_pages * share_ppm // WHOLE_PPM) if share_ppm else num_pages
