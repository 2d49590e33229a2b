"""The prefix index: which full pages hold the KV of which tokens, so that common prefixes are shared.

Pages are named by a chained hash: a page's digest covers its tokens and its parent's digest, and so the
whole prefix (the scheme of vLLM's automatic prefix caching, arXiv:2309.06180 section 4.4). The hash only
finds candidates. A match also needs the same parent entry and equal tokens, so by induction a hash
collision cannot return another prefix's KV. Each tenant has its own root: prefixes never match across
tenants, which also closes the timing channel between them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from workers.kv.pages import PagePool

ROOT_PAGE = -1


def chain_digest(parent: bytes, tokens: bytes) -> bytes:
    """64-bit digest of a page: ``blake2b(parent digest + token bytes)``. The same in every process."""
    return hashlib.blake2b(parent + tokens, digest_size=8).digest()


def common_prefix_len(a: array[int], b: array[int]) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(a), len(b))
    differ = np.frombuffer(a, np.int32, length) != np.frombuffer(b, np.int32, length) if length else np.zeros(0, bool)
    return int(differ.argmax()) if differ.any() else length


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """One full page in the index (or, with ``page == ROOT_PAGE``, a tenant's root)."""

    parent: PrefixEntry | None
    digest: bytes
    tokens: bytes
    page: int
    owner: str = ""
    # By page. Used to drop a whole branch when its session is released.
    children: dict[int, PrefixEntry] = field(default_factory=dict)
    # A session other than the owner has used the entry: it is kept after the owner's release.
    shared: bool = False


class PrefixIndex:
    """Finds the page that follows a page for given tokens. Holds one reference to each of its pages."""

    def __init__(self, pool: PagePool, digest: Callable[[bytes, bytes], bytes] = chain_digest) -> None:
        self._pool = pool
        self._digest = digest
        self._roots: dict[str, PrefixEntry] = {}
        self._by_digest: dict[bytes, list[PrefixEntry]] = {}
        self._by_page: dict[int, PrefixEntry] = {}
        # For each owner, the topmost entries of its subtrees, by page.
        self._tops: dict[str, dict[int, PrefixEntry]] = {}

    def __len__(self) -> int:
        return len(self._by_page)

    def pages(self) -> list[int]:
        """The pages in the index, for the auditor."""
        return list(self._by_page)

    def root(self, tenant: str) -> PrefixEntry:
        """The root of a tenant's entries."""
        entry = self._roots.get(tenant)
        if entry is None:
            salt = hashlib.blake2b(tenant.encode(), digest_size=8).digest()
            entry = self._roots[tenant] = PrefixEntry(None, salt, b"", ROOT_PAGE)
        return entry

    def find(self, parent: PrefixEntry, tokens: array[int]) -> PrefixEntry | None:
        """The child of ``parent`` for one page of ``tokens``."""
        raw = tokens.tobytes()
        for entry in self._by_digest.get(self._digest(parent.digest, raw), ()):
            if entry.parent is parent and entry.tokens == raw:
                return entry
        return None

    def add(self, parent: PrefixEntry, tokens: array[int], page: int, owner: str) -> PrefixEntry | None:
        """Index ``page`` as the one that holds ``tokens`` after ``parent``.

        Returns None, and indexes nothing, when another page is indexed for the same tokens: then two
        sequences computed the same prefix at the same time. The second keeps its page to itself.
        """
        raw = tokens.tobytes()
        digest = self._digest(parent.digest, raw)
        bucket = self._by_digest.setdefault(digest, [])
        for other in bucket:
            if other.parent is parent and other.tokens == raw:
                return None
        entry = PrefixEntry(parent, digest, raw, page, owner)
        bucket.append(entry)
        parent.children[page] = entry
        if parent.owner != owner or parent.page == ROOT_PAGE:
            self._tops.setdefault(owner, {})[page] = entry
        self._by_page[page] = entry
        self._pool.mark_indexed(page)
        return entry

    def remove(self, entry: PrefixEntry) -> bool:
        """Drop an entry. Returns whether its page became free.

        Its children cannot be found any more, because lookups no longer reach this entry. They are
        evicted as they age.
        """
        bucket = self._by_digest[entry.digest]
        bucket.remove(entry)
        if not bucket:
            del self._by_digest[entry.digest]
        del self._by_page[entry.page]
        tops = self._tops.get(entry.owner)
        if tops is not None and tops.pop(entry.page, None) is not None and not tops:
            del self._tops[entry.owner]
        assert entry.parent is not None
        del entry.parent.children[entry.page]
        return self._pool.unmark_indexed(entry.page)

    def remove_owned(self, owner: str) -> None:
        """Drop every entry of ``owner`` that no other session has used, in all branches."""
        owned = list(self._tops.get(owner, {}).values())
        for entry in owned:
            owned.extend(child for child in entry.children.values() if child.owner == owner)
        # A session that uses an entry uses all entries above it: shared ones are above those that are not.
        for entry in reversed(owned):
            if not entry.shared:
                self.remove(entry)

    def evict_oldest(self) -> bool:
        """Evict the least recently used entry whose page has no other holder. False if there is none."""
        page = self._pool.oldest_cached()
        if page is None:
            return False
        self.remove(self._by_page[page])
        return True
