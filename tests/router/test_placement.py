"""Placement: cached prefix weighed against load."""

from __future__ import annotations

from array import array

from router.fleet.placement import CHUNK_TOKENS, Placement, WorkerView


def view(name: str, live: int = 0, sessions: int = 0) -> WorkerView:
    return WorkerView(name, live, sessions, max_turns=4)


def tokens(count: int, first: int = 0) -> array:
    return array("i", range(first, first + count))


def test_no_worker_to_choose() -> None:
    assert Placement().choose([], "t", tokens(10)) is None


def test_least_loaded_then_fewest_sessions() -> None:
    placement = Placement()
    assert placement.choose([view("a", 2), view("b", 1)], "t", tokens(10)) == "b"
    assert placement.choose([view("a", 1, 5), view("b", 1, 2)], "t", tokens(10)) == "b"


def test_cached_prefix_wins_until_load_outweighs_it() -> None:
    placement, prompt = Placement(), tokens(16 * CHUNK_TOKENS)
    placement.remember("a", "t", prompt)
    assert placement.choose([view("a", 2), view("b")], "t", prompt) == "a"
    assert placement.choose([view("a", 9), view("b")], "t", prompt) == "b"
    assert placement.choose([view("a", 1), view("b")], "t", tokens(1000, first=5)) == "b", "another prompt"
    assert placement.choose([view("a", 1), view("b")], "other", prompt) == "b", "another tenant"


def test_prefix_must_be_whole_from_the_start() -> None:
    placement, prompt = Placement(), tokens(4 * CHUNK_TOKENS)
    placement.remember("a", "t", prompt)
    changed = array("i", [9999, *prompt[1:]])
    assert placement.choose([view("a", 1), view("b")], "t", changed) == "b"


def test_cache_key_stays_while_there_is_room() -> None:
    placement = Placement()
    placement.remember("a", "t", tokens(5), "key")
    assert placement.choose([view("a", 3), view("b")], "t", tokens(9), "key") == "a"
    assert placement.choose([view("a", 4), view("b")], "t", tokens(9), "key") == "b"
    assert placement.choose([view("a", 3), view("b")], "u", tokens(9), "key") == "b", "another tenant's key"


def test_lost_worker_is_forgotten() -> None:
    placement, prompt = Placement(), tokens(8 * CHUNK_TOKENS)
    for name in ("a", "b"):
        placement.remember(name, "t", prompt, "key")
    placement.forget("b")
    assert placement.choose([view("a", 1), view("c")], "t", prompt, "key") == "a"
    placement.forget("a")
    assert placement._chunks == {} and placement._keys == {}
