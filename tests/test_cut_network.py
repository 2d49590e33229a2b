"""Partitions between hosts (network namespaces): ranks end together, and routers reach their workers again."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator

import pytest

from router.fleet.link import WorkerAddress, WorkerLink
from tests.hosts import Host, hosts, ip, why_no_namespaces
from tests.waiting import until
from tests.workers.rank_process import RankProcess

LEASE_S, START_S, MARGIN_S = 2.0, 90.0, 6.0
CUT_S = 14.0
"""TCP's next retransmission would be 11 s after it."""
BACK_S = 4.0


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with hosts(2) as (_, made):
        yield made


@pytest.mark.parametrize("cut", ["both ways", "to the leader only", "to the follower only"])
def test_ranks_that_cannot_reach_each_other_end_together(two_hosts: list[Host], cut: str) -> None:
    start = functools.partial(RankProcess, size=2, lease_s=LEASE_S)
    leader, follower = two_hosts
    ranks = [start(leader)]
    try:
        store = (leader.address, int(ranks[0].wait_for("port:", START_S)))
        ranks.append(start(follower, rank=1, store=store))
        for rank in ranks:
            rank.wait_for("ready", START_S)
        if cut == "both ways":
            leader.cut()
        else:
            source, target = (follower, leader) if cut == "to the leader only" else (leader, follower)
            ip("-n", source.space, "route", "add", "blackhole", f"{target.address}/32")
        reasons = [rank.wait_for("lost:", LEASE_S + MARGIN_S) for rank in ranks]
        assert all(reasons)
        assert [rank.process.wait(MARGIN_S) for rank in ranks] == [9, 9]
    finally:
        for rank in ranks:
            rank.end()


async def test_a_worker_that_was_cut_off_is_reached_soon_after(two_hosts: list[Host]) -> None:
    host = two_hosts[0]
    worker = RankProcess(host, lease_s=LEASE_S)
    try:
        address = await asyncio.to_thread(worker.wait_for, "ready:", START_S)
        link = WorkerLink(WorkerAddress("w", 1, address, 1), LEASE_S)
        await until(lambda: link.alive, 10, "the worker to be reached")
        host.cut()
        await until(lambda: not link.alive, LEASE_S + MARGIN_S, "its silence to be noticed")
        await asyncio.sleep(CUT_S)
        host.heal()
        await until(lambda: link.alive, BACK_S, "the worker to be reached again")
        assert await link.fetch_stats(5.0)
        await link.close()
    finally:
        worker.end()
