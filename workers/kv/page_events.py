"""What happens to indexed pages, for one that copies them elsewhere while they may be evicted."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class FilledPage(NamedTuple):
    """A page that is full and committed. Its KV does not change while the index names the page (law L4)."""

    group: int
    page: int
    digest: bytes
    """Of all tokens up to its end, and their tenant."""
    owner: str
    """The session that computed it."""


class PageEvents:
    """Pages that became filled, and which the index dropped since. Another thread may ask ``is_unchanged``."""

    def __init__(self) -> None:
        self._released: list[str] = []
        self._flushed: list[str | None] = []
        self._filled: list[tuple[FilledPage, int]] = []
        self._drops: Counter[tuple[int, int]] = Counter()

    def add(self, filled: FilledPage) -> None:
        """The index names a page."""
        self._filled.append((filled, self._drops[filled.group, filled.page]))

    def dropped(self, group: int, page: int) -> None:
        """The index names a page no more: from now on it may be written."""
        self._drops[group, page] += 1

    def release(self, owner: str) -> None:
        """Of this session's pages no copy may stay, but of those that another one has used."""
        self._released.append(owner)

    def flush(self, tenant: str | None) -> None:
        """No copy may stay of any page, or of the tenant's."""
        self._flushed.append(tenant)

    def take(self) -> tuple[list[tuple[FilledPage, int]], list[str], list[str | None]]:
        """Since the last call: pages, each with what ``is_unchanged`` wants; released sessions; flushed tenants, of
        which None is all.
        """
        taken = self._filled, self._released, self._flushed
        self._filled, self._released, self._flushed = [], [], []
        return taken

    def is_unchanged(self, filled: FilledPage, num_drops: int) -> bool:
        """Whether the index has named the page ever since: all that was read of it until now is its KV."""
        return self._drops[filled.group, filled.page] == num_drops
