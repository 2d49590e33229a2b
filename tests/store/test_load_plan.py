"""What is loaded and what is computed, where tiers differ in speed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from holdfast.v1.store_pb2 import TIER_DISK, TIER_MEMORY, TIER_PEER
from workers.kv import SessionCache
from workers.kv.groups import full_group, window_group
from workers.serving.bandwidth import Bandwidth
from workers.serving.load_plan import LoadPlan, load_plans, measure, seconds_until_there

SIZE = 4
TIERS = (TIER_MEMORY, TIER_DISK, TIER_PEER)


def bandwidths(**bytes_per_s: float) -> dict[int, Bandwidth]:
    given = dict(zip(TIERS, ("memory", "disk", "peer"), strict=True))
    leader = cast(Any, SimpleNamespace())
    found = {tier: Bandwidth(leader) for tier in TIERS}
    for tier, name in given.items():
        if name in bytes_per_s:
            found[tier].measured(int(bytes_per_s[name]), 1.0)
    return found


def plans(tiers: list[int], first: int = 0) -> list[LoadPlan]:
    groups = SessionCache([full_group(64)], SIZE).groups
    return list(load_plans(groups, [tiers], first, SIZE, [100]))


def test_the_part_in_memory_is_loaded_and_the_part_on_a_slow_disk_computed() -> None:
    choices = [*plans([TIER_MEMORY] * 3 + [TIER_DISK] * 5), None]

    def best(**speeds: float) -> int:
        known = bandwidths(memory=10_000, **speeds)
        chosen = min(choices, key=lambda plan: seconds_until_there(plan, 0, 32, known, 100.0))
        return chosen.reached if chosen is not None else 0

    assert best(disk=100) == 12, "5 s from the disk, 0.2 s to compute"
    assert best(disk=10_000) == 32
    assert best() == 32, "a disk that was never measured"
    slow = bandwidths(memory=10, disk=10)
    assert min(choices, key=lambda plan: seconds_until_there(plan, 0, 32, slow, 100.0)) is None


@given(st.lists(st.sampled_from((0, *TIERS)), max_size=12), st.integers(0, 3), st.booleans())
def test_a_plan_takes_of_its_tiers_what_a_resume_needs(tiers: list[int], first: int, window: bool) -> None:
    groups = SessionCache([window_group(64, 8) if window else full_group(64)], SIZE).groups
    for plan in load_plans(groups, [tiers], first, SIZE, [100]):
        (columns,) = plan.columns
        assert plan.reached > first * SIZE and columns[-1] == plan.reached // SIZE - 1
        assert len(columns) == sum(plan.pages.values()) == sum(plan.bytes.values()) // 100
        assert all(tiers[column - first] in plan.pages for column in columns)
        assert window or columns == list(range(first, plan.reached // SIZE))


def test_the_time_of_a_mixed_load_is_its_slowest_tiers() -> None:
    known = bandwidths(memory=1000)
    (plan,) = (plan for plan in plans([TIER_MEMORY] * 5 + [TIER_DISK] * 5) if len(plan.pages) == 2)
    measure(plan, 1000, 3.0, known)
    assert known[TIER_MEMORY].seconds(1000) == 1.0 and known[TIER_DISK].seconds(500) == 2.5
    measure(plan, 200, 3.0, known)
    assert known[TIER_DISK].seconds(500) == 2.5, "the device had most of it: that says nothing"
