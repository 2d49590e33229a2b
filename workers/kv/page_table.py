"""A slot's page tables, one a KV group, and the only code that changes them (law L2).

A window group's table, in half-open ranges of pages (``-`` is FREED)::

    |- - K K - - - - - - . . . . |
     [0, num_evicted)              freed, except pages K in the ranges of ``protected``
                         [num_evicted, len(pages))  held
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from workers.kv.groups import GroupSpec
from workers.kv.pages import PagePool
from workers.kv.scopes import ScopePages

FREED = -1
"""The table entry of a page that a window has passed. It is never attended to and never set again (law L5)."""


class PageCopy(NamedTuple):
    """Copy page ``source`` of a group to page ``target`` before the step writes anything (copy on write)."""

    group: int
    source: int
    target: int


TableUpdate: TypeAlias = tuple[int, int, int, Sequence[int]]
"""``(group, row, column, pages)``: set the entries from that one on in the group's page tables on the device. A plain
tuple, because a named one takes five times as long to make, and each turn has one a group."""


@dataclass(slots=True, eq=False)
class PageTable:
    """One slot's pages in one group: position ``i`` is in ``pages[i // page_size]``."""

    row: int
    pages: list[int] = field(default_factory=list)
    num_evicted: int = 0
    protected: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of columns that sliding keeps: the windows before the slot's resume points. What is held below
    ``num_evicted`` lies in them."""
    slides_from: int = 0
    """Sliding frees nothing below this committed length. 0: not known."""
    digest: int = 0
    """The sum of ``hash((column, page))`` over the held entries."""
    charged_to: ScopePages | None = None
    """Who pays for pages that it takes, if the slot's scope has a share."""

    def held(self) -> list[int]:
        """The columns that hold a page, ascending."""
        first = min((first for first, _ in self.protected), default=self.num_evicted)
        protected = [column for column in range(first, self.num_evicted) if self.pages[column] != FREED]
        return [*protected, *range(self.num_evicted, len(self.pages))]

    def protects(self, column: int) -> bool:
        for first, end in self.protected:  # noqa: SIM110  # ``any`` takes three times as long
            if first <= column < end:
                return True
        return False


class GroupTables:
    """One group: its pool, and all operations on its tables. A table grows at its end and is cut from it.

    A whole-prefix group holds every page and can resume from any length. A window group holds, before each resume
    point and before the committed length, ``window`` tokens: one more than the next token attends to, so that the last
    committed token can be computed again (its logits start an output).

    One class for both: where the interpreter meets two at one place, each call there takes three times as long.
    """

    def __init__(
        self, index: int, spec: GroupSpec, page_size: int, updates: list[TableUpdate], copies: list[PageCopy]
    ) -> None:
        self.index = index
        self.spec = spec
        self.window = spec.window
        self.pool = PagePool(spec.num_pages)
        self._size = page_size
        self._updates = updates
        self._copies = copies

    @property
    def name(self) -> str:
        return self.spec.name

    def append_free(self, table: PageTable, count: int) -> None:
        """Append free pages, which the caller has reserved."""
        pages = table.pages
        if count == 1:  # most turns take a page at a time
            column, page = len(pages), self.pool.take_one()
            self._updates.append((self.index, table.row, column, (page,)))
            table.digest += hash((column, page))
            pages.append(page)
            if table.charged_to is not None:
                self.pool.charge((page,), table.charged_to)
            return
        taken = self.pool.take_free(count)
        self._updates.append((self.index, table.row, len(pages), taken))
        table.digest += sum(map(hash, enumerate(taken, len(pages))))
        pages += taken
        if table.charged_to is not None:
            self.pool.charge(taken, table.charged_to)

    def append_shared(self, table: PageTable, page: int) -> None:
        """Append a page that another holder lists too."""
        self.pool.incref(page)
        column = len(table.pages)
        self._updates.append((self.index, table.row, column, (page,)))
        table.digest += hash((column, page))
        table.pages.append(page)

    def copy_last_page(self, table: PageTable) -> None:
        """Replace the last page, a shared one, by a copy in a free page (law L4)."""
        # The pending copy takes over the slot's reference to the old page until the copy is made.
        shared = table.pages.pop()
        table.digest -= hash((len(table.pages), shared))
        self.append_free(table, 1)
        self._copies.append(PageCopy(self.index, shared, table.pages[-1]))

    def cut(self, table: PageTable, num_kept: int) -> int:
        """Drop the pages from column ``num_kept`` on. Returns how many became free."""
        pages, num_freed = table.pages, 0
        if len(pages) == num_kept + 1 and pages[-1] != FREED:  # most turns drop a page at a time
            page = pages.pop()
            if self._copies:
                self._cancel_copies([page])
            table.digest -= hash((num_kept, page))
            num_freed = self.pool.decref(page)
        elif len(pages) > num_kept:
            num_freed = self._cut_pages(table, num_kept)
        if num_kept <= table.num_evicted:
            table.num_evicted, table.slides_from = num_kept, 0
            self._find_held(table)
        return num_freed

    def _cut_pages(self, table: PageTable, num_kept: int) -> int:
        dropped = table.pages[num_kept:]
        del table.pages[num_kept:]
        if self._copies:
            self._cancel_copies(dropped)
        table.digest -= sum(map(hash, enumerate(dropped, num_kept)))
        if num_kept < table.num_evicted:
            freed = [column for column, page in enumerate(dropped, num_kept) if page == FREED]
            table.digest += sum([hash((column, FREED)) for column in freed])
            dropped = [page for page in dropped if page != FREED]
        dropped.reverse()
        return self.pool.decref_all(dropped)

    def _find_held(self, table: PageTable) -> None:
        """Count the pages of resume points just before ``num_evicted`` as held: after a cut they are the window."""
        while table.num_evicted and table.pages[table.num_evicted - 1] != FREED:
            table.num_evicted -= 1

    def _cancel_copies(self, targets: list[int]) -> None:
        # A freed page must not be written any more: another slot may own it by then.
        for copy in [c for c in self._copies if c.group == self.index and c.target in targets]:
            self._copies.remove(copy)
            self.pool.decref(copy.source)

    # ---- what a window changes ---------------------------------------------------------------------

    def resumable_len(self, table: PageTable, wanted_len: int) -> int:
        """The greatest length, at most ``wanted_len``, whose next token can be computed from what is held."""
        if not self.window:
            return wanted_len
        size, window, pages, length = self._size, self.window, table.pages, wanted_len
        while True:
            first = (length - window + 1) // size
            if first >= table.num_evicted:
                return length
            end = min(-(-length // size), table.num_evicted)
            if FREED not in pages[max(0, first) : end]:
                return length
            column = end - 1
            while pages[column] != FREED:
                column -= 1
            # Every length in (column * page_size, length] needs that page too.
            length = column * size

    def first_needed(self, length: int) -> int:
        """The first column that must be held to compute the token at position ``length``."""
        if not self.window:
            return 0
        return max(0, length - self.window + 1) // self._size

    def skip_to(self, table: PageTable, column: int) -> None:
        """Continue the table at ``column`` without pages before it. Only window groups have such entries."""
        assert self.window or len(table.pages) >= column, f"a {self.name} group holds every page"
        if column > len(table.pages):
            self._evict_up_to(table, len(table.pages))
            table.pages += [FREED] * (column - len(table.pages))
            table.num_evicted, table.slides_from = column, 0

    def append_imported(self, table: PageTable, end: int, columns: Collection[int]) -> None:
        """Append entries up to column ``end``, with free pages for ``columns``: those that another worker sends."""
        if not self.window:
            if end > len(table.pages):
                self.append_free(table, end - len(table.pages))
            return
        first, sent = len(table.pages), set(columns)
        for column in range(first, end):
            if column in sent:
                self.append_free(table, 1)
            else:
                table.pages.append(FREED)
        # The sender's resume points are protected when they are known here; until then, what was held stays too.
        table.slides_from = 0
        table.protected.append((table.num_evicted, end))
        self._find_evicted(table, first)

    def share(self, parent: PageTable, child: PageTable, committed_len: int) -> None:
        """Give an empty table what a slot with the first ``committed_len`` tokens of ``parent`` holds."""
        if not self.window:
            for page in parent.pages[: -(-committed_len // self._size)]:
                self.append_shared(child, page)
            return
        first, end = max(0, committed_len - self.window) // self._size, -(-committed_len // self._size)
        for column in parent.held():
            if column < end and (column >= first or child.protects(column)):
                child.pages += [FREED] * (column - len(child.pages))
                self.append_shared(child, parent.pages[column])
        child.pages += [FREED] * (end - len(child.pages))
        self._find_evicted(child, 0)

    def _find_evicted(self, table: PageTable, first: int) -> None:
        """Set ``num_evicted`` after entries, held and freed, were appended from ``first`` on."""
        pages = table.pages
        last_freed = next((c for c in range(len(pages) - 1, first - 1, -1) if pages[c] == FREED), None)
        if last_freed is not None:
            table.num_evicted, table.slides_from = last_freed + 1, 0

    def slide(self, table: PageTable, committed_len: int) -> int:
        """Free what neither the next token nor a resume point needs. Returns how many pages became free."""
        if not self.window or committed_len < table.slides_from:
            return 0
        num_freed, end = 0, (committed_len - self.window) // self._size
        reached = max(end, table.num_evicted)
        for first, stop in table.protected:
            if first <= table.num_evicted and end <= stop:
                reached = max(reached, stop)
                break
        else:
            if end > table.num_evicted:
                num_freed = self._evict_up_to(table, end)
        table.slides_from = (reached + 1) * self._size + self.window
        return num_freed

    def _evict_up_to(self, table: PageTable, end: int) -> int:
        num_freed = 0
        for column in range(table.num_evicted, end):
            if not table.protects(column):
                num_freed += self._evict(table, column)
        table.num_evicted = end
        return num_freed

    def protect(self, table: PageTable, resume_points: Sequence[int]) -> int:
        """Set the lengths, besides the committed one, whose windows are held. Returns how many pages became free."""
        if not self.window:
            return 0
        # From the point's page on, not from the point: a fork of a running session shares whole pages.
        size, window, num_freed, before = self._size, self.window, 0, table.protected
        self._find_held(table)
        table.slides_from = 0
        table.protected = [
            (max(0, point // size * size - window) // size, -(-point // size)) for point in resume_points
        ]
        for first, end in before:
            if (first, end) not in table.protected:
                for column in range(first, min(end, table.num_evicted)):
                    if table.pages[column] != FREED and not table.protects(column):
                        num_freed += self._evict(table, column)
        return num_freed

    def _evict(self, table: PageTable, column: int) -> int:
        page, table.pages[column] = table.pages[column], FREED
        if self._copies:
            self._cancel_copies([page])
        table.digest -= hash((column, page))
        return self.pool.decref(page)
