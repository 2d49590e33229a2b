"""The prefix index: which full pages hold the KV of which tokens, so that common prefixes are shared.

An entry stands for one page of tokens after its parent's, and names a page for each KV group, each of which
can be evicted by itself. Entries are found by a chained hash: an entry's digest covers its tokens and its
parent's digest, and so the whole prefix (the scheme of vLLM's automatic prefix caching, arXiv:2309.06180
section 4.4). The hash only finds candidates. A match also needs the same parent entry and equal tokens, so
by induction a hash collision cannot return another prefix's KV. Each scope (a tenant, or tenants that agreed to
share) has its own root: prefixes never match across scopes, which also closes the timing channel between them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.names import tenant_of
from workers.kv.page_events import FilledPage, PageEvents
from workers.kv.page_table import FREED, GroupTables, PageTable
from workers.kv.scopes import ScopePages

DIGEST_BYTES = 16


def chain_digest(parent: bytes, tokens: bytes) -> bytes:
    """128-bit digest of a page: ``blake2b(parent digest + token bytes)``. The same in every process.

    By itself, without the comparison of tokens, it names copies of pages outside of a rank (law L16).
    """
    return hashlib.blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


def root_digest(scope: str) -> bytes:
    """What a scope's chains begin with."""
    return hashlib.blake2b(scope.encode(), digest_size=DIGEST_BYTES).digest()


def page_digests(scope: str, tokens: array[int], page_size: int) -> list[bytes]:
    """The digest of each full page of ``tokens``."""
    digest, digests = root_digest(scope), []
    for end in range(page_size, len(tokens) + 1, page_size):
        digest = chain_digest(digest, tokens[end - page_size : end].tobytes())
        digests.append(digest)
    return digests


def common_prefix_len(a: array[int], b: array[int]) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(a), len(b))
    differ = np.frombuffer(a, np.int32, length) != np.frombuffer(b, np.int32, length) if length else np.zeros(0, bool)
    return int(differ.argmax()) if differ.any() else length


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """One page of tokens in the index (or, without a parent, a scope's root)."""

    parent: PrefixEntry | None
    digest: bytes
    tokens: bytes
    pages: list[int]
    """By group; FREED where the group's page was evicted."""
    owner: str = ""
    # Used to drop a whole branch when its session is released.
    children: dict[PrefixEntry, None] = field(default_factory=dict)
    # A session other than the owner has used the entry: it is kept after the owner's release.
    shared: bool = False
    removed: bool = False


class PrefixIndex:
    """Finds the entry that follows an entry for given tokens. Holds one reference to each of its pages."""

    def __init__(self, groups: Sequence[GroupTables], digest: Callable[[bytes, bytes], bytes] = chain_digest) -> None:
        self._groups = groups
        self._digest = digest
        self._roots: dict[str, PrefixEntry] = {}
        self._by_digest: dict[bytes, list[PrefixEntry]] = {}
        self._by_page: list[dict[int, PrefixEntry]] = [{} for _ in groups]
        self.events: PageEvents | None = None
        """What a copier of pages outside must know, if there is one."""
        # For each owner, the topmost entries of its subtrees.
        self._tops: dict[str, dict[PrefixEntry, None]] = {}

    def pages(self, group: int) -> list[int]:
        """The group's pages in the index, for the auditor."""
        return list(self._by_page[group])

    def entry_of(self, group: int, page: int) -> PrefixEntry | None:
        """The entry that names a page."""
        return self._by_page[group].get(page)

    def root(self, scope: str) -> PrefixEntry:
        """The root of a scope's entries."""
        entry = self._roots.get(scope)
        if entry is None:
            entry = self._roots[scope] = PrefixEntry(None, root_digest(scope), b"", [])
        return entry

    def pages_of(self, scope: str, group: int) -> list[int]:
        """The group's pages in a scope's entries that can be found."""
        entries = list(self.root(scope).children)
        for entry in entries:
            entries.extend(entry.children)
        return [entry.pages[group] for entry in entries if entry.pages[group] != FREED]

    def find(self, parent: PrefixEntry, tokens: array[int]) -> PrefixEntry | None:
        """The child of ``parent`` for one page of ``tokens``."""
        raw = tokens.tobytes()
        return self._find(parent, self._digest(parent.digest, raw), raw)

    def _find(self, parent: PrefixEntry, digest: bytes, raw: bytes) -> PrefixEntry | None:
        for entry in self._by_digest.get(digest, ()):
            if entry.parent is parent and entry.tokens == raw:
                return entry
        return None

    def longest_match(
        self, parent: PrefixEntry, tables: Sequence[PageTable], known: int, tokens: array[int], page_size: int
    ) -> list[PrefixEntry]:
        """The entries after ``parent`` for ``tokens``, up to the greatest length from which every group can resume.

        ``tables`` hold the first ``known`` pages. At least one of ``tokens`` stays to be computed.
        """
        found: list[PrefixEntry] = []
        num_matched = 0
        # How many pages in a row, up to the last entry, each window group could hold.
        in_row = {group: len(table.pages) - table.num_evicted for group, table in self._windows(tables)}
        for end in range(known + 1, (len(tokens) - 1) // page_size + 1):
            entry = self.find(parent, tokens[(end - 1) * page_size : end * page_size])
            if entry is None:
                break
            found.append(entry)
            resumable = True
            for group in in_row:
                in_row[group] = in_row[group] + 1 if entry.pages[group.index] != FREED else 0
                resumable &= end - in_row[group] <= group.first_needed(end * page_size)
            if resumable:
                num_matched = len(found)
            parent = entry
        return found[:num_matched]

    def _windows(self, tables: Sequence[PageTable]) -> list[tuple[GroupTables, PageTable]]:
        return [(g, table) for g, table in zip(self._groups, tables, strict=True) if g.window]

    def add(
        self, parent: PrefixEntry, tokens: array[int], tables: Sequence[PageTable], column: int, owner: str
    ) -> PrefixEntry | None:
        """The entry for ``tokens`` after ``parent``: a new one that names the tables' pages, or the one there is.

        That one takes those of the pages whose own were evicted. Returns None if ``parent`` was removed.
        """
        if parent.removed:
            return None
        raw = tokens.tobytes()
        digest = self._digest(parent.digest, raw)
        entry = self._find(parent, digest, raw)
        if entry is None:
            entry = PrefixEntry(parent, digest, raw, [FREED] * len(tables), owner)
            self._by_digest.setdefault(digest, []).append(entry)
            parent.children[entry] = None
            if parent.owner != owner or parent.parent is None:
                self._tops.setdefault(owner, {})[entry] = None
        entry.shared |= entry.owner != owner
        if FREED not in entry.pages:
            return entry
        for group, known in enumerate(entry.pages):
            if known == FREED and (page := tables[group].pages[column]) != FREED:
                entry.pages[group] = page
                self._by_page[group][page] = entry
                self._groups[group].pool.mark_indexed(page)
                if self.events is not None:
                    self.events.add(FilledPage(group, page, digest, owner))
        return entry

    def remove(self, entry: PrefixEntry) -> None:
        """Drop an entry.

        Its children cannot be found any more, because lookups no longer reach this entry. They are
        evicted as they age.
        """
        bucket = self._by_digest[entry.digest]
        bucket.remove(entry)
        if not bucket:
            del self._by_digest[entry.digest]
        tops = self._tops.get(entry.owner)
        if tops is not None and entry in tops:
            del tops[entry]
            if not tops:
                del self._tops[entry.owner]
        entry.removed = True
        assert entry.parent is not None
        del entry.parent.children[entry]
        for group, page in enumerate(entry.pages):
            if page != FREED:
                self._drop_page(entry, group, page)

    def remove_owned(self, owner: str) -> None:
        """Drop every entry of ``owner`` that no other session has used, in all branches."""
        owned = list(self._tops.get(owner, {}))
        for entry in owned:
            owned.extend(child for child in entry.children if child.owner == owner)
        # A session that uses an entry uses all entries above it: shared ones are above those that are not.
        for entry in reversed(owned):
            if not entry.shared and not entry.removed:
                self.remove(entry)
                self._remove_empty(entry.parent)

    def remove_cached(self, tenant: str) -> None:
        """Drop every entry that a session of the tenant computed and whose pages nobody else holds."""
        owned: dict[PrefixEntry, None] = {}
        for owner, tops in self._tops.items():
            if tenant_of(owner) == tenant:
                found = list(tops)
                for entry in found:
                    found.extend(child for child in entry.children if child.owner == owner)
                owned |= dict.fromkeys(found)
        for entry in reversed(owned):
            # Up to the first that is used, or leads to another entry.
            while entry in owned and not entry.removed and not entry.children and not self._is_held(entry):
                self.remove(entry)
                assert entry.parent is not None
                entry = entry.parent

    def _is_held(self, entry: PrefixEntry) -> bool:
        pools = [group.pool for group in self._groups]
        return any(pools[group].is_held(page) for group, page in enumerate(entry.pages) if page != FREED)

    def evict_oldest(self, group: int, scope: ScopePages | None = None) -> bool:
        """Free the group's (or a scope's) least recently used page that only the index holds. False if there is none.

        Nothing can be resumed past an entry without its page of a whole-prefix group, so such an entry is
        removed. One without its page of a window group still leads to its children.
        """
        page = self._groups[group].pool.oldest_cached() if scope is None else next(iter(scope.cached), None)
        if page is None:
            return False
        entry = self._by_page[group][page]
        if self._groups[group].window:
            self._drop_page(entry, group, page)
            self._remove_empty(entry)
        else:
            self.remove(entry)
        return True

    def _drop_page(self, entry: PrefixEntry, group: int, page: int) -> None:
        entry.pages[group] = FREED
        del self._by_page[group][page]
        if self.events is not None:
            self.events.dropped(group, page)
        self._groups[group].pool.unmark_indexed(page)

    def _remove_empty(self, entry: PrefixEntry | None) -> None:
        """Remove an entry that names no page and leads nowhere, and what it was the last to keep."""
        while entry is not None and entry.parent is not None and not entry.removed:
            if entry.children or any(page != FREED for page in entry.pages):
                return
            self.remove(entry)
            entry = entry.parent
