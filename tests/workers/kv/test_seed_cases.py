"""The cases that leaked or corrupted pages in other engines, with their numbers, on each kind of KV."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.errors import OutOfPages, SessionBusy
from workers.kv import GroupSpec, Outcome, SessionCache, full_group, latent_group, window_group
from workers.kv.slot import new_tokens

PAGE_SIZES = [1, 4, 16, 256]
LONG = 4096
"""A window longer than every sequence here: what holds for full attention holds for it."""
KINDS: dict[str, Callable[[int], list[GroupSpec]]] = {
    "full": lambda pages: [full_group(pages)],
    "latent": lambda pages: [latent_group(pages)],
    "window": lambda pages: [window_group(pages, LONG)],
    "full + window": lambda pages: [full_group(pages), window_group(pages, LONG)],
}
pytestmark = [pytest.mark.parametrize("page_size", PAGE_SIZES), pytest.mark.parametrize("kind", KINDS)]


def cache_of(kind: str, page_size: int, capacity_tokens: int = 4096) -> SessionCache:
    return SessionCache(KINDS[kind](max(8, capacity_tokens // page_size)), page_size, max_slots=16)


def pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def run_turn(cache: SessionCache, session: str, turn: str, tokens: list[int], keep_len: int, new: int = 3) -> int:
    """A whole turn: input ``tokens``, ``new`` sampled tokens of which the last is not computed."""
    cache.open(session)
    full = new_tokens(tokens)
    cached = cache.resume(session, turn, full, keep_len)
    cache.extend(session, len(tokens) - cached)
    cache.commit({session: full[cached:]})
    for i in range(new - 1):
        cache.extend(session, 1)
        cache.commit({session: new_tokens([9000 + i])})
    cache.finish(session, turn, Outcome.COMPLETED, known=new_tokens([9000 + new - 1]))
    cache.finish_copies(len(cache.pending_copies))
    assert cache.audit().ok, cache.audit()
    return cached


def history(prompt: list[int], new: int = 3) -> list[int]:
    return prompt + [9000 + i for i in range(new)]


def test_a_speculation_allocates_ahead_and_commits_fewer(kind: str, page_size: int) -> None:
    cache = cache_of(kind, page_size)
    slot = cache.open("s")
    prompt = new_tokens(range(10))
    cache.resume("s", "t", prompt, 0)
    cache.extend("s", 10)
    cache.commit({"s": prompt})
    num_draft, committed = 5, 10
    for accepted in (2, 6, 1, 3):
        cache.extend("s", num_draft + 1)
        assert slot.allocated_len == committed + num_draft + 1
        cache.commit({"s": new_tokens(range(100, 100 + accepted))})
        committed += accepted
        assert slot.committed_len == committed
        assert len(slot.tables[-1].pages) >= pages(committed, page_size)
        assert cache.audit().ok
    cache.finish("s", "t", Outcome.COMPLETED)
    assert slot.committed_len == slot.allocated_len == 22
    assert len(slot.tables[-1].pages) == pages(22, page_size)
    assert (
        cache.groups[-1].pool.num_held + cache.groups[-1].pool.num_cached + cache.groups[-1].pool.num_free
        == cache.groups[-1].pool.num_pages
    )
    assert cache.audit().ok


def test_b_retracted_turn_returns_with_the_logit_reserve(kind: str, page_size: int) -> None:
    cache = cache_of(kind, page_size)
    slot = cache.open("s")
    tokens = new_tokens(range(33))
    cache.resume("s", "t", tokens, 0)
    cache.extend("s", 33)
    cache.commit({"s": tokens})
    for round_trip in range(5):
        cache.finish("s", "t", Outcome.RETRACTED)
        assert (slot.committed_len, len(slot.tables[-1].pages)) == (33, pages(33, page_size))
        cached = cache.resume("s", "t", tokens, 33)
        assert cached == 32, f"round trip {round_trip}"
        cache.extend("s", 1)
        assert len(slot.tables[-1].pages) == pages(33, page_size)
        cache.commit({"s": tokens[32:]})
        cache.finish_copies(len(cache.pending_copies))
        assert cache.audit().ok
    cache.finish("s", "t", Outcome.ABORTED)
    assert cache.audit().ok


def test_c_rejected_turn_is_retried_and_leaves_nothing(kind: str, page_size: int) -> None:
    cache = cache_of(kind, page_size, capacity_tokens=8 * page_size)
    num_pages = cache.groups[-1].pool.num_pages
    prompt = list(range(2 * page_size))
    run_turn(cache, "s", "t1", prompt, 0, new=1)
    cache.open("hog")
    cache.resume("hog", "h", new_tokens([7] * (4 * page_size + 1)), 0)
    cache.extend("hog", (num_pages - 2) * page_size)
    turn = new_tokens(history(prompt, 1) + [5] * (3 * page_size))
    before = list(cache.groups[-1].pool.refcounts)
    for _ in range(4):
        # The last sampled token's KV is not there yet: all else is.
        assert cache.resume("s", "t2", turn, 2 * page_size + 1) == 2 * page_size
        with pytest.raises(OutOfPages):
            cache.extend("s", 3 * page_size + 1)
        cache.finish("s", "t2", Outcome.RETRACTED)
        assert cache.groups[-1].pool.refcounts == before
        assert cache.audit().ok
    cache.finish("hog", "h", Outcome.ABORTED)
    cache.release_session("hog")
    assert cache.resume("s", "t2", turn, 2 * page_size + 1) == 2 * page_size
    cache.extend("s", 3 * page_size + 1)
    assert cache.audit().ok


def test_d_chunked_prefill_keeps_its_place_between_chunks(kind: str, page_size: int) -> None:
    cache = cache_of(kind, page_size)
    slot = cache.open("s")
    tokens = new_tokens(range(1000, 1100))
    cache.resume("s", "t", tokens, 0)
    for start in range(0, 100, 7):
        chunk = tokens[start : start + 7]
        assert cache.resume("s", "t", tokens, 0) == start, "resuming a running turn changes nothing"
        cache.extend("s", len(chunk))
        cache.commit({"s": chunk})
        assert slot.committed_len == start + len(chunk)
        assert len(slot.tables[-1].pages) == pages(slot.committed_len, page_size)
        assert cache.audit().ok
    assert slot.tokens == tokens
    cache.finish("s", "t", Outcome.COMPLETED)
    assert cache.resume("s", "t2", tokens + new_tokens([1]), 100) == 100


def test_e_audit_counts_lent_slots_once_while_turns_run(kind: str, page_size: int) -> None:
    cache = cache_of(kind, page_size)
    shared = list(range(2 * page_size))
    run_turn(cache, "warm", "t", [*shared, 1], 0)
    for i in range(4):
        tokens = new_tokens(shared + [50 + i] * 5)
        cache.open(f"s{i}")
        assert cache.resume(f"s{i}", f"t{i}", tokens, 0) == 2 * page_size
        report = cache.audit()
        assert report.ok and report.num_running == i + 1
        cache.extend(f"s{i}", 5)
        assert cache.audit().ok
        cache.commit({f"s{i}": tokens[2 * page_size :]})
        assert cache.audit().ok
    leak = next(p for p, n in enumerate(cache.groups[-1].pool.refcounts) if n > 1)
    cache.groups[-1].pool.refcounts[leak] += 1
    assert cache.audit().groups[-1].leaked == (leak,)
    cache.groups[-1].pool.refcounts[leak] -= 2
    assert cache.audit().groups[-1].overheld == (leak,)


def test_f_cut_inside_a_page_and_on_its_edge(kind: str, page_size: int) -> None:
    cache = cache_of(kind, page_size)
    run_turn(cache, "s", "t", list(range(3 * page_size)), 0, new=1)
    slot = cache.slots["s"]
    kept = list(slot.tables[-1].pages)
    inside = 2 * page_size - page_size // 2
    assert cache.free_tail("s", inside) == 0, "the pages beyond stay cached in the prefix index"
    assert slot.tables[-1].pages == kept[: pages(inside, page_size)], "the partial page stays with the slot"
    assert cache.free_tail("s", inside) == 0, "again changes nothing"
    assert cache.free_tail("s", page_size) == 0
    assert slot.tables[-1].pages == kept[:1]
    assert (slot.committed_len, slot.allocated_len, len(slot.tokens)) == (page_size, page_size, page_size)
    assert cache.audit().ok
    assert cache.free_tail("s", 0) == 0 and slot.tables[-1].pages == []
    assert cache.audit().ok


def test_f_cut_inside_a_private_page_frees_whole_pages_only(kind: str, page_size: int) -> None:
    cache = cache_of(kind, page_size)
    cache.open("s")
    tokens = new_tokens(range(3 * page_size))
    cache.resume("s", "t", tokens, 0)
    cache.extend("s", 3 * page_size)
    slot = cache.slots["s"]
    # Nothing is committed to the last two pages: they are private, and a cut frees them.
    cache.commit({"s": tokens[: page_size + page_size // 2]})
    first = slot.tables[-1].pages[: pages(page_size + page_size // 2, page_size)]
    free_before = cache.groups[-1].pool.num_free
    cache.finish("s", "t", Outcome.COMPLETED)
    assert slot.tables[-1].pages == first
    assert cache.groups[-1].pool.num_free - free_before == 3 - len(first)
    assert cache.audit().ok


def test_f_cut_inside_a_shared_prefix_page_copies_before_writing(kind: str, page_size: int) -> None:
    cache = cache_of(kind, page_size)
    prompt = [*list(range(2 * page_size)), 77]
    run_turn(cache, "a", "t", prompt, 0)
    run_turn(cache, "b", "t", prompt, 0)
    a, b = cache.slots["a"], cache.slots["b"]
    assert a.tables[-1].pages[:2] == b.tables[-1].pages[:2], "sessions share the prefix"
    cut = 2 * page_size - page_size // 2
    cache.free_tail("b", cut)
    edited = new_tokens([*prompt[:cut], 5, 6, 7])
    assert cache.resume("b", "t2", edited, cut) == cut
    cache.extend("b", 3)
    if page_size == 1:
        assert cache.pending_copies == [], "a cut on an edge needs no copy"
    else:
        *others, copy = cache.pending_copies
        assert len(others) == len(cache.groups) - 1
        assert copy.source == a.tables[-1].pages[1] and copy.target == b.tables[-1].pages[1] != a.tables[-1].pages[1]
    assert a.tables[-1].pages[0] == b.tables[-1].pages[0]
    cache.commit({"b": edited[cut:]})
    assert cache.audit().ok
    cache.finish_copies(len(cache.pending_copies))
    assert cache.audit().ok
    assert a.tokens[: 2 * page_size] == new_tokens(prompt[: 2 * page_size])


@pytest.mark.parametrize("moment", ["idle", "queued", "mid-prefill", "mid-decode"])
def test_g_release_at_any_moment_and_twice(kind: str, page_size: int, moment: str) -> None:
    cache = cache_of(kind, page_size)
    prompt = list(range(2 * page_size + 1))
    run_turn(cache, "s", "t1", prompt, 0)
    tokens = new_tokens(history(prompt) + [3] * (2 * page_size))
    if moment != "idle":
        cache.resume("s", "t2", tokens, len(prompt) + 3)
        cache.extend("s", page_size)
    if moment == "queued":
        cache.finish("s", "t2", Outcome.RETRACTED)
    if moment == "mid-decode":
        cache.extend("s", len(tokens) - cache.slots["s"].committed_len)
        cache.commit({"s": tokens[cache.slots["s"].committed_len :]})
        cache.extend("s", 1)
    if moment != "idle":
        with pytest.raises(SessionBusy):
            cache.release_session("s")
        assert cache.audit().ok
        cache.finish("s", "t2", Outcome.ABORTED)
    assert cache.release_session("s") > 0
    assert cache.release_session("s") == 0
    cache.finish_copies(len(cache.pending_copies))
    assert cache.groups[-1].pool.num_free == cache.groups[-1].pool.num_pages, (
        "no other session used its pages: all are free"
    )
    assert cache.audit().ok


def test_g_release_keeps_what_others_share(kind: str, page_size: int) -> None:
    cache = cache_of(kind, page_size)
    system = list(range(2 * page_size))
    run_turn(cache, "a", "t", [*system, 1], 0)
    run_turn(cache, "b", "t", [*system, 2], 0)
    cache.release_session("a")
    assert cache.slots["b"].committed_len == len(system) + 3
    assert cache.audit().ok
    cache.release_session("b")
    assert cache.groups[-1].pool.num_cached == 2, "a prefix that two sessions used stays for the third"
    assert run_turn(cache, "c", "t", [*system, 3], 0) == 2 * page_size


def test_h_abort_of_the_first_turn_leaves_an_empty_session(kind: str, page_size: int) -> None:
    cache = cache_of(kind, page_size)
    slot = cache.open("s")
    tokens = new_tokens(range(3 * page_size))
    cache.resume("s", "t1", tokens, 0)
    cache.extend("s", len(tokens))
    cache.commit({"s": tokens[: 2 * page_size - 1 or 1]})
    cache.finish("s", "t1", Outcome.ABORTED)
    assert (slot.committed_len, slot.allocated_len, slot.tables[-1].pages, len(slot.tokens)) == (0, 0, [], 0)
    assert cache.audit().ok
    cache.resume("s", "t2", new_tokens([42] * (page_size + 1)), 0)
    assert slot.committed_len == 0


@pytest.mark.parametrize("aborted_at", [2, 3, 5])
def test_h_abort_of_the_nth_turn_goes_back_to_the_last_good_one(kind: str, page_size: int, aborted_at: int) -> None:
    cache = cache_of(kind, page_size)
    tokens: list[int] = []
    for turn in range(1, aborted_at):
        prompt = tokens + [100 * turn + i for i in range(7)]
        cached = run_turn(cache, "s", f"t{turn}", prompt, len(tokens))
        assert cached == max(0, len(tokens) - 1)
        tokens = history(prompt)
    doomed = new_tokens(tokens + [666] * 50)
    cache.resume("s", "doomed", doomed, len(tokens))
    cache.extend("s", 51)
    cache.commit({"s": doomed[len(tokens) - 1 : len(tokens) + 20]})
    cache.finish("s", "doomed", Outcome.ABORTED)
    slot = cache.slots["s"]
    assert slot.tokens == new_tokens(tokens)
    cached = run_turn(cache, "s", "next", [*tokens, 1, 2, 3], len(tokens))
    assert cached == len(tokens), "even the last sampled token's KV was computed by the aborted turn"


def test_h_aborted_twice_is_aborted_once(kind: str, page_size: int) -> None:
    cache = cache_of(kind, page_size)
    run_turn(cache, "s", "t1", [1, 2, 3], 0)
    cache.resume("s", "t2", new_tokens([1, 2, 3, 9000, 9001, 9002, 4]), 6)
    cache.finish("s", "t2", Outcome.ABORTED)
    state = (list(cache.groups[-1].pool.refcounts), cache.slots["s"].committed_len)
    cache.finish("s", "t2", Outcome.ABORTED)
    cache.finish("unknown", "t2", Outcome.ABORTED)
    assert state == (list(cache.groups[-1].pool.refcounts), cache.slots["s"].committed_len)
