"""The pool of KV pages: reference counts, the free list, and the cached pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from workers.kv.scopes import ScopePages


class PagePool:
    """Reference counts, the free list, and the LRU of cached pages.

    A page is in one of three states:

    ====================  ==============================================================
    free                  ``refcounts[p] == 0``: on the free list
    cached                ``refcounts[p] == 1`` and the prefix index is that one holder
    held                  otherwise: a slot or a pending copy lists it
    ====================  ==============================================================

    The count of a page equals the number of its holders (law L1). The pool does not know who they are;
    the auditor asks them.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self.num_pages = num_pages
        self.refcounts = [0] * num_pages
        # Popped from the end, so that a new pool hands out 0, 1, 2, ... in order.
        self.free = list(range(num_pages - 1, -1, -1))
        # Oldest first. Holders drop a chain of pages from its end, so a page always enters after its
        # descendants, and LRU order never evicts a parent before its children.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._indexed = bytearray(num_pages)
        self.touched: set[int] = set()
        """Pages whose count changed since the last digest."""
        self._charged: dict[int, ScopePages] = {}
        """Who took a page that is not free, if its scope has a share."""
        self.freed: list[int] | None = None
        """Pages that became free since ``take_freed``, some of them taken again. None: nobody asks."""

    @property
    def num_free(self) -> int:
        return len(self.free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_pages - len(self.free) - len(self._cached)

    def free_pages(self) -> list[int]:
        """The free list, for the auditor."""
        return list(self.free)

    def cached_pages(self) -> list[int]:
        """The cached pages, least recently used first, for the auditor."""
        return list(self._cached)

    def take_one(self) -> int:
        """As ``take_free(1)``, in half the time: most turns take a page at a time."""
        page = self.free.pop()
        assert self.refcounts[page] == 0, f"page {page} was on the free list with holders"
        self.refcounts[page] = 1
        self.touched.add(page)
        return page

    def take_free(self, count: int) -> list[int]:
        """``count`` free pages, now with one reference each. The caller has made sure that there are as many."""
        assert 0 < count <= len(self.free), f"{count} pages are wanted, {len(self.free)} are free"
        pages = self.free[: -count - 1 : -1]
        del self.free[-count:]
        refcounts = self.refcounts
        for page in pages:
            assert refcounts[page] == 0, f"page {page} was on the free list with holders"
            refcounts[page] = 1
        self.touched.update(pages)
        return pages

    def is_held(self, page: int) -> bool:
        """Whether somebody beside the prefix index holds the page."""
        return self.refcounts[page] > 1 or not self._indexed[page]

    def oldest_cached(self) -> int | None:
        """The least recently used cached page. The prefix index must drop it to free it."""
        return next(iter(self._cached), None)

    def charge(self, pages: Iterable[int], scope: ScopePages) -> None:
        """Count pages that are not free as the scope's, until they are. Idempotent."""
        for page in pages:
            if page not in self._charged:
                self._charged[page] = scope
                scope.num_charged += 1

    def list_cached(self, scope: ScopePages) -> None:
        """Pages were charged to the scope that are cached already: list them in order."""
        scope.cached = OrderedDict.fromkeys(page for page in self._cached if self._charged.get(page) is scope)

    def charged_to(self, page: int) -> ScopePages | None:
        """The scope that a page is charged to, for the auditor."""
        return self._charged.get(page)

    def _cache(self, page: int) -> None:
        self._cached[page] = None
        if self._charged and (scope := self._charged.get(page)) is not None:
            scope.cached[page] = None

    def _uncache(self, page: int) -> None:
        self._cached.pop(page, None)
        if self._charged and (scope := self._charged.get(page)) is not None:
            scope.cached.pop(page, None)

    def incref(self, page: int) -> None:
        assert self.refcounts[page] > 0, f"page {page} is free and cannot be referenced"
        self.refcounts[page] += 1
        self.touched.add(page)
        if self._indexed[page]:
            self._uncache(page)

    def decref(self, page: int) -> int:
        """Drop one reference. Returns how many pages became free: 1 or 0."""
        self.touched.add(page)
        return self._decref(page)

    def decref_all(self, pages: Sequence[int]) -> int:
        """Drop one reference of each, in order. Returns how many pages became free."""
        self.touched.update(pages)
        refcounts, indexed, free = self.refcounts, self._indexed, self.free
        plain, num_freed = not self._charged and self.freed is None, 0
        for page in pages:
            if plain and refcounts[page] == 1 and not indexed[page]:  # the last holder of a page that nobody counts
                refcounts[page] = 0
                free.append(page)
                num_freed += 1
            else:
                num_freed += self._decref(page)
        return num_freed

    def _decref(self, page: int) -> int:
        count = self.refcounts[page] - 1
        assert count >= 0, f"page {page} has no reference to drop"
        self.refcounts[page] = count
        if count == 0:
            assert not self._indexed[page], f"page {page} was freed while the prefix index holds it"
            self.free.append(page)
            if self._charged and (scope := self._charged.pop(page, None)) is not None:
                scope.num_charged -= 1
            if self.freed is not None:
                self.freed.append(page)
            return 1
        if count == 1 and self._indexed[page]:
            self._cache(page)
        return 0

    def take_freed(self) -> list[int]:
        """What ``freed`` lists, for the first time from now on."""
        freed, self.freed = self.freed or [], []
        return freed

    def mark_indexed(self, page: int) -> None:
        """Count the prefix index as a holder of ``page``, which has another holder already."""
        assert not self._indexed[page], f"page {page} is in the prefix index already"
        self.incref(page)
        self._indexed[page] = 1

    def unmark_indexed(self, page: int) -> None:
        """Drop the prefix index's reference."""
        assert self._indexed[page], f"page {page} is not in the prefix index"
        self._indexed[page] = 0
        self._uncache(page)
        self.decref(page)
