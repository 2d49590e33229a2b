"""Planted bugs of KV groups, each a plausible mistake of a line, which the state machine must find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from holdfast.errors import HoldfastError
from tests.workers.kv.test_state_machine import KVCore
from workers.engine.step_log import RecordedCache
from workers.kv import KVScope, SessionCache
from workers.kv.digest import StateDigest
from workers.kv.page_table import GroupTables, PageTable
from workers.kv.pages import PagePool
from workers.kv.prefix import PrefixIndex
from workers.kv.scopes import ScopePages
from workers.kv.slot import Slot
from workers.kv.slot_store import SlotStore

MAX_EXAMPLES, CONTROL_EXAMPLES = 4000, 300
"""Far above what a bug takes (some hundreds at most), and what is played where there is none."""
_slide, _element, _add = GroupTables.slide, StateDigest._element, PrefixIndex.add
_slide_slot, _extend = SlotStore._slide, SessionCache._extend
_charge, _set_share = PagePool.charge, SlotStore._set_share


def _slide_early(self: GroupTables, table: PageTable, committed_len: int) -> int:
    return _slide(self, table, committed_len + 1)


def _slide_as_if_idle(self: SlotStore, slot: Slot) -> int:
    turn_id, slot.turn_id = slot.turn_id, None
    try:
        return _slide_slot(self, slot)
    finally:
        slot.turn_id = turn_id


def _slide_at_an_extend(self: SessionCache, slot: Slot, *lens: int) -> None:
    _extend(self, slot, *lens)
    for group in self.windows:
        group.slide(slot.tables[group.index], slot.allocated_len)


def _element_without_allocated(self: StateDigest, slot: Slot) -> int:
    with mock.patch.object(slot, "allocated_len", slot.committed_len):
        return _element(self, slot)


def _first_group_s_element(self: StateDigest, slot: Slot) -> int:
    with mock.patch.object(slot, "tables", slot.tables[:1]):
        return _element(self, slot)


def _index_in_the_first_group(self: PrefixIndex, parent: Any, tokens: Any, tables: Any, *rest: Any) -> Any:
    pool = self._groups[0].pool
    with contextlib.ExitStack() as stack:
        for group in self._groups[1:]:
            stack.enter_context(mock.patch.object(group, "pool", pool))
        return _add(self, parent, tokens, tables, *rest)


def _charge_without_what_was_there(self: PagePool, pages: Any, scope: ScopePages) -> None:
    if len(pages := list(pages)) == 1:  # a page that a turn takes
        _charge(self, pages, scope)


def _check_no_share(self: SlotStore, slot: Slot, group: GroupTables, count: int) -> bool:
    return False


def _set_share_on_the_leader_alone(self: SlotStore, scope: KVScope) -> None:
    if isinstance(self, RecordedCache):
        _set_share(self, scope)


PLANTED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a window page is freed one token early": lambda: mock.patch.object(GroupTables, "slide", _slide_early),
    "the window before an abort's resume point is freed": lambda: mock.patch.object(
        SlotStore, "_slide", _slide_as_if_idle
    ),
    "a prefix match is longer than the window held": lambda: mock.patch.object(
        PrefixIndex, "_windows", lambda self, tables: []
    ),
    "a draft's tail is not cut": lambda: mock.patch.object(SessionCache, "cut_tails", lambda self, session_ids: None),
    "a window page is freed by a draft": lambda: mock.patch.object(SessionCache, "_extend", _slide_at_an_extend),
    "the digest leaves out the allocated length": lambda: mock.patch.object(
        StateDigest, "_element", _element_without_allocated
    ),
    "a group is left out of the digest": lambda: mock.patch.object(StateDigest, "_element", _first_group_s_element),
    "a page is counted in two groups": lambda: mock.patch.object(PrefixIndex, "add", _index_in_the_first_group),
    "a scope beyond its share evicts others": lambda: mock.patch.object(SlotStore, "_check_share", _check_no_share),
    "what a scope holds when it gets a share is not charged": lambda: mock.patch.object(
        PagePool, "charge", _charge_without_what_was_there
    ),
    "followers know of no shares": lambda: mock.patch.object(SlotStore, "_set_share", _set_share_on_the_leader_alone),
    "none": contextlib.nullcontext,
}


def examples_to_find(name: str, max_examples: int, first_seed: int = 0) -> int | None:
    """How many examples the machine takes to fail under a planted bug; None: more than ``max_examples``."""
    count = 0

    class Counted(KVCore):
        def __init__(self) -> None:
            nonlocal count
            count += 1
            super().__init__()

    profile = settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with PLANTED[name]():
        try:
            run_state_machine_as_test(seed(first_seed)(Counted), settings=profile)
        except (AssertionError, IndexError, KeyError, HoldfastError):
            return count
    return None


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    found = examples_to_find(name, CONTROL_EXAMPLES if name == "none" else MAX_EXAMPLES)
    print(f"{name}: found after {found} examples")
    assert (found is None) == (name == "none")
