"""The slots' page tables, and the device updates that follow from changing them."""

from __future__ import annotations

from typing import NamedTuple

from workers.kv.pages import PagePool
from workers.kv.slot import Slot


class PageCopy(NamedTuple):
    """Copy page ``source`` to page ``target`` before the step writes anything (copy on write)."""

    source: int
    target: int


class TableUpdate(NamedTuple):
    """Set entry ``column`` of row ``row`` of the device's page tables to ``page``."""

    row: int
    column: int
    page: int


class PageTables:
    """The only code that changes ``Slot.pages`` (law L2): tables grow at their end and are cut from it."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._updates: list[TableUpdate] = []
        self.pending_copies: list[PageCopy] = []
        """Copies the device has yet to make. Each holds a reference to its source."""

    def append_free(self, slot: Slot, count: int = 1) -> None:
        """Append free pages, which the caller has reserved."""
        for _ in range(count):
            page = self._pool.take_free()
            assert page is not None, "the caller reserved pages"
            self._updates.append(TableUpdate(slot.row, len(slot.pages), page))
            slot.pages.append(page)

    def append_shared(self, slot: Slot, page: int) -> None:
        """Append a page that another holder lists too."""
        self._pool.incref(page)
        self._updates.append(TableUpdate(slot.row, len(slot.pages), page))
        slot.pages.append(page)

    def copy_last_page(self, slot: Slot) -> None:
        """Replace the last page, a shared one, by a copy in a free page (law L4)."""
        # The pending copy takes over the slot's reference to the old page until the copy is made.
        shared = slot.pages.pop()
        self.append_free(slot)
        self.pending_copies.append(PageCopy(shared, slot.pages[-1]))

    def cut(self, slot: Slot, num_kept: int) -> int:
        """Drop the pages from index ``num_kept`` on. Returns how many became free."""
        if self.pending_copies and len(slot.pages) > num_kept:
            self._cancel_copies(slot.pages[num_kept:])
        num_freed = 0
        while len(slot.pages) > num_kept:
            num_freed += self._pool.decref(slot.pages.pop())
        return num_freed

    def take_updates(self) -> list[TableUpdate]:
        """The updates since the last call, in order."""
        updates, self._updates = self._updates, []
        return updates

    def finish_copies(self, count: int) -> None:
        """The device has made the first ``count`` pending copies (or queued them before any later write)."""
        done, self.pending_copies = self.pending_copies[:count], self.pending_copies[count:]
        for copy in done:
            self._pool.decref(copy.source)

    def _cancel_copies(self, targets: list[int]) -> None:
        # A freed page must not be written any more: another slot may own it by then.
        for copy in [c for c in self.pending_copies if c.target in targets]:
            self.pending_copies.remove(copy)
            self._pool.decref(copy.source)
