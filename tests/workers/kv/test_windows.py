"""Window groups: what they hold, from where they can resume, and the seed cases with a small window."""

from __future__ import annotations

import pytest

from holdfast.errors import OutOfPages
from workers.kv import FREED, Outcome, SessionCache, full_group, window_group
from workers.kv.slot import Slot, new_tokens

WINDOW = 10
pytestmark = pytest.mark.parametrize("page_size", [1, 4, 16])


def cache_of(page_size: int, points: int = 1, window_pages: int | None = None) -> SessionCache:
    pages = 4096 // page_size
    return SessionCache([full_group(pages), window_group(window_pages or pages, WINDOW)], page_size, 16, points)


def compute(cache: SessionCache, session: str, tokens: list[int], chunk: int = 7) -> None:
    """Compute what is missing, chunk by chunk, as a prefill does."""
    slot = cache.slots[session]
    cache.reserve(session, len(tokens) - slot.committed_len)
    while slot.committed_len < len(tokens):
        part = new_tokens(tokens[slot.committed_len : slot.committed_len + chunk])
        cache.extend(session, len(part))
        cache.finish_copies(len(cache.pending_copies))
        cache.commit({session: part})
        assert cache.audit().ok, cache.audit()


def turn(cache: SessionCache, session: str, turn_id: str, tokens: list[int], keep_len: int) -> int:
    cache.open(session)
    cached = cache.resume(session, turn_id, new_tokens(tokens), keep_len)
    compute(cache, session, tokens)
    cache.finish(session, turn_id, Outcome.COMPLETED)
    assert cache.audit().ok, cache.audit()
    return cached


def held(slot: Slot) -> int:
    return len(slot.tables[1].held())


def test_a_long_prefill_holds_windows_not_tokens(page_size: int) -> None:
    cache = cache_of(page_size, window_pages=3 * (-(-WINDOW // page_size) + 1) + 7 // page_size + 3)
    slot = cache.open("s")
    tokens = list(range(2000))
    cache.resume("s", "t", new_tokens(tokens), 0)
    compute(cache, "s", tokens)
    assert held(slot) <= -(-WINDOW // page_size) + 1
    assert len(slot.tables[0].held()) == -(-2000 // page_size)


@pytest.mark.parametrize("points", [0, 1, 3])
def test_an_idle_session_holds_a_window_for_each_resume_point(page_size: int, points: int) -> None:
    cache = cache_of(page_size, points)
    for number in range(1, 7):
        turn(cache, "s", f"t{number}", list(range(50 * number + number % 3)), 50 * (number - 1))
        most = (points + 1) * (-(-WINDOW // page_size) + 1)
        assert held(cache.slots["s"]) <= most


def test_entries_of_freed_pages_stay_freed(page_size: int) -> None:
    cache = cache_of(page_size)
    turn(cache, "s", "t", list(range(200)), 0)
    table = cache.slots["s"].tables[1]
    freed = [column for column, page in enumerate(table.pages) if page == FREED]
    assert freed
    turn(cache, "s", "t2", list(range(260)), 200)
    assert all(table.pages[column] == FREED for column in freed)


def test_regenerating_the_last_answer_computes_its_own_tokens_alone(page_size: int) -> None:
    cache = cache_of(page_size)
    turn(cache, "s", "t1", list(range(100)), 0)
    turn(cache, "s", "t2", list(range(200)), 100)
    again = [*range(100), *range(500, 600)]
    assert turn(cache, "s", "t2 again", again, 100) == 100
    assert turn(cache, "s", "t2 once more", [*range(100), *range(600, 700)], 100) == 100


def test_a_rewind_below_the_windows_goes_to_what_all_groups_have(page_size: int) -> None:
    cache = cache_of(page_size)
    turn(cache, "s", "t1", list(range(100)), 0)
    turn(cache, "s", "t2", list(range(200)), 100)
    slot = cache.slots["s"]
    cache.free_tail("s", 60)
    assert slot.committed_len == 0 and len(slot.tokens) == 60, "the tokens are known, their KV is computed again"
    assert cache.audit().ok


def test_a_rewind_below_the_windows_takes_the_cached_prefix(page_size: int) -> None:
    cache = cache_of(page_size)
    turn(cache, "s", "t1", list(range(200)), 0)
    cached = turn(cache, "s", "t2", [*range(60), *range(700, 720)], 60)
    assert cached == 60 // page_size * page_size, "the pages that the window passed are still cached"


def test_an_abort_finds_its_window_however_far_the_turn_went(page_size: int) -> None:
    cache = cache_of(page_size, points=0)
    turn(cache, "s", "t1", list(range(100)), 0)
    for length in (101, 105, 140, 300):
        cache.resume("s", "doomed", new_tokens(range(length)), 100)
        compute(cache, "s", list(range(length)))
        cache.finish("s", "doomed", Outcome.ABORTED)
        assert cache.slots["s"].committed_len == 100
        assert cache.audit().ok


def test_a_prefix_matches_where_the_window_is_cached(page_size: int) -> None:
    """What evictions left of the window's pages bounds the match, and a session that computes them puts them back."""
    cache = cache_of(page_size)
    system = list(range(160))
    turn(cache, "a", "t", [*system, *range(900, 950)], 0)
    while cache.index.evict_oldest(1):
        pass
    assert turn(cache, "b", "t", [*system, 901], 0) == 0
    assert turn(cache, "c", "t", [*system, 902], 0) == 160, "b's pages stand in for those that were evicted"
    shared = cache.slots["c"].tables[0].pages[:2]
    assert shared == cache.slots["a"].tables[0].pages[:2], "full pages are still those of the first"


def test_c_rejected_turn_is_retried_and_takes_nothing_twice(page_size: int) -> None:
    cache = cache_of(page_size, window_pages=-(-64 // page_size) + 4)
    turn(cache, "s", "t1", list(range(40)), 0)
    cache.open("hog")
    cache.resume("hog", "h", new_tokens([7] * 60), 0)
    cache.extend("hog", 56)
    before = [list(group.pool.refcounts) for group in cache.groups]
    tokens = new_tokens(range(140))
    for _ in range(4):
        assert cache.resume("s", "t2", tokens, 40) == 40
        cache.reserve("s", 100)
        with pytest.raises(OutOfPages):
            cache.extend("s", 100)
        cache.finish("s", "t2", Outcome.RETRACTED)
        assert cache.audit().ok
    cache.finish_copies(len(cache.pending_copies))
    after = [list(group.pool.refcounts) for group in cache.groups]
    assert [sum(part) for part in after] == [sum(part) for part in before]
    cache.finish("hog", "h", Outcome.ABORTED)
    cache.release_session("hog")
    assert cache.resume("s", "t2", tokens, 40) == 40
    compute(cache, "s", list(tokens))


def test_d_resume_below_allocated_frees_the_tail_of_every_group(page_size: int) -> None:
    cache = cache_of(page_size)
    slot = cache.open("s")
    tokens = list(range(50))
    cache.resume("s", "t", new_tokens(tokens), 0)
    cache.extend("s", 50 + 9)
    cache.commit({"s": new_tokens(tokens)})
    cache.finish("s", "t", Outcome.RETRACTED)
    assert (slot.allocated_len, slot.reserved_len) == (50, 50)
    assert cache.resume("s", "t", new_tokens(tokens), 50) == 49, "the window reaches one token further back"
    assert cache.audit().ok


def test_e_audit_counts_lent_slots_once_while_turns_run(page_size: int) -> None:
    cache = cache_of(page_size)
    turn(cache, "warm", "t", list(range(64)), 0)
    for i in range(4):
        cache.open(f"s{i}")
        cached = cache.resume(f"s{i}", f"t{i}", new_tokens([*range(64), *[50 + i] * 5]), 0)
        assert cached == 64
        cache.extend(f"s{i}", 5)
        assert cache.audit().ok and cache.audit().num_running == i + 1
    pool = cache.groups[1].pool
    leak = next(page for page, count in enumerate(pool.refcounts) if count > 1)
    pool.refcounts[leak] += 1
    report = cache.audit()
    assert report.groups[1].leaked == (leak,) and not report.groups[0].leaked


@pytest.mark.parametrize("at", [37, 40, 43])
def test_f_protected_lengths_need_no_page_s_edge(page_size: int, at: int) -> None:
    cache = cache_of(page_size)
    turn(cache, "s", "t1", list(range(at)), 0)
    turn(cache, "s", "t2", list(range(at + 90)), at)
    cache.free_tail("s", at)
    assert cache.slots["s"].committed_len == at
    tokens = [*range(at), *[3] * 5]
    assert cache.resume("s", "t3", new_tokens(tokens), at) == at
    compute(cache, "s", tokens)


def test_g_release_while_decoding_frees_every_group(page_size: int) -> None:
    cache = cache_of(page_size)
    turn(cache, "s", "t1", list(range(100)), 0)
    cache.resume("s", "t2", new_tokens(range(101)), 100)
    for token in range(100, 130):
        assert cache.extend_by_one(["s"]) == 1
        cache.finish_copies(len(cache.pending_copies))
        cache.commit({"s": new_tokens([token])})
    cache.finish("s", "t2", Outcome.ABORTED)
    assert cache.release_session("s") > 0 and cache.release_session("s") == 0
    assert cache.num_free() == [group.pool.num_pages for group in cache.groups]


def test_caches_of_other_windows_or_resume_points_have_another_digest(page_size: int) -> None:
    """A rank that is configured differently is refused before the first step (L8)."""
    groups = [full_group(8), window_group(8, WINDOW)]
    digests = {
        SessionCache(groups, page_size).digest(),
        SessionCache(groups, page_size, num_resume_points=2).digest(),
        SessionCache([groups[0], window_group(8, WINDOW + 1)], page_size).digest(),
        SessionCache([groups[0], window_group(9, WINDOW)], page_size).digest(),
    }
    assert len(digests) == 4


@pytest.mark.parametrize("more", [1, 5, 9, 60])
def test_an_abort_keeps_a_window_that_overlaps_an_older_resume_point(page_size: int, more: int) -> None:
    """Pages just before ``num_evicted`` may be held for the aborted turn's start alone: then they are the window."""
    for keep_len in range(5, 22):
        cache, tokens = cache_of(page_size), list(range(keep_len + more))
        turn(cache, "s", "first", list(range(5)), 0)
        turn(cache, "s", "second", list(range(22)), 5)
        cache.resume("s", "third", new_tokens(tokens), keep_len, match_prefix=False)
        compute(cache, "s", tokens)
        cache.finish("s", "third", Outcome.ABORTED)
        assert cache.audit().ok, cache.audit()
        assert cache.slots["s"].committed_len == keep_len


@pytest.mark.parametrize("shared_len", [16, 32, 48])
def test_an_import_past_a_cached_prefix_frees_the_prefix_s_window(page_size: int, shared_len: int) -> None:
    here, elsewhere = cache_of(page_size), cache_of(page_size)
    tokens = list(range(130))
    # What the session left here is of no use: it took another way, and the window before the fork has passed.
    turn(here, "s", "t1", [*tokens[:64], *range(1000, 1040)], 0)
    while here.index.evict_oldest(1):
        pass
    turn(here, "other", "t1", tokens[:shared_len], 0)
    turn(elsewhere, "s", "t1", tokens[:100], 0)
    turn(elsewhere, "s", "t2", tokens, 100)
    source = elsewhere.slots["s"]
    columns = [table.held() for table in source.tables]
    cached = here.resume("s", "import", new_tokens(tokens), 64)
    assert cached == shared_len
    here.extend_imported("s", source.committed_len - cached, source.turn_starts, columns)
    assert here.audit().ok, here.audit()
    here.commit({"s": new_tokens(tokens[cached : source.committed_len])})
    here.finish("s", "import", Outcome.COMPLETED, new_tokens(tokens[source.committed_len :]))
    assert here.audit().ok, here.audit()
    assert held(here.slots["s"]) <= 2 * (-(-WINDOW // page_size) + 1)
    here.release_session("s")
    here.flush()
    here.release_session("other")
    here.flush()
    assert here.num_free() == [group.pool.num_pages for group in here.groups]
