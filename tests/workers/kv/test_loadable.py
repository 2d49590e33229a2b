"""What can be resumed from copies, against trying each length; digests; and pages that are dropped while copied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.kv import SessionCache
from workers.kv.groups import GroupSpec, full_group, window_group
from workers.kv.loadable import first_loaded, loadable_len
from workers.kv.page_events import FilledPage, PageEvents
from workers.kv.prefix import page_digests
from workers.kv.slot import Outcome, new_tokens

PAGES = 64
GROUPS = st.lists(st.sampled_from([0, 1, 3, 8, 20]), min_size=1, max_size=3)


@given(GROUPS, st.sampled_from([1, 4]), st.integers(0, 3), st.integers(0, 12), st.data())
def test_the_greatest_length_that_all_groups_can_resume_from(
    windows: list[int], size: int, first: int, count: int, data: st.DataObject
) -> None:
    specs: list[GroupSpec] = [window_group(PAGES, w) if w else full_group(PAGES) for w in windows]
    groups = SessionCache(specs, size).groups
    present = [data.draw(st.lists(st.booleans(), min_size=count, max_size=count)) for _ in groups]

    def can(end: int) -> bool:
        return all(
            all(there[c - first] for c in range(max(first, first_loaded(group, end * size, size)), end))
            for group, there in zip(groups, present, strict=True)
        )

    assert loadable_len(groups, present, first, size) == size * max(
        e for e in range(first, first + count + 1) if can(e)
    )


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.sampled_from([1, 4]))
def test_a_digest_covers_all_tokens_before_it_and_their_tenant(ours: list[int], theirs: list[int], size: int) -> None:
    a, b = (page_digests("x", new_tokens(tokens), size) for tokens in (ours, theirs))
    assert len(a) == len(ours) // size and all(len(digest) == 16 for digest in a)
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        assert (one == other) == (ours[: (i + 1) * size] == theirs[: (i + 1) * size])
    assert not set(a) & set(page_digests("y", new_tokens(ours), size))


def fill(cache: SessionCache, session: str, tokens: list[int]) -> None:
    cache.open(session, "t")
    known = cache.resume(session, session, new_tokens(tokens), 0)
    cache.extend(session, len(tokens) - known)
    cache.commit({session: new_tokens(tokens[known:])})
    cache.finish(session, session, Outcome.COMPLETED)


def test_filled_pages_are_noted_once_with_the_digest_of_their_tokens() -> None:
    cache = SessionCache([full_group(8)], 4)
    events = cache.index.events = PageEvents()
    fill(cache, "a", list(range(10)))
    filled, released, flushed = events.take()
    digests = page_digests("t", new_tokens(range(10)), 4)
    assert [each for each, _ in filled] == [FilledPage(0, i, digest, "a") for i, digest in enumerate(digests)]
    fill(cache, "b", list(range(10)))
    cache.release_session("a")
    cache.flush("t")
    cache.flush()
    assert events.take() == ([], ["a"], ["t", None]) and events.take() == ([], [], [])
    assert (released, flushed) == ([], [])


def test_a_page_that_was_evicted_is_not_unchanged_even_if_it_holds_the_same_tokens_again() -> None:
    cache = SessionCache([full_group(3)], 4)
    events = cache.index.events = PageEvents()
    fill(cache, "a", list(range(9)))
    (first, second), _, _ = events.take()
    assert events.is_unchanged(*first) and events.is_unchanged(*second)
    fill(cache, "b", list(range(50, 59)))
    assert not events.is_unchanged(*first) and not events.is_unchanged(*second)
    fill(cache, "a", list(range(9)))
    assert not events.is_unchanged(*first)
    again, _, _ = events.take()
    assert all(events.is_unchanged(*each) for each in again[-2:])
