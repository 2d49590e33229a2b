"""A migrating session's KV comes from its new worker's node, where that has copies; the old worker sends the rest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from router.fleet.migration import DrainReport
from tests.harness import Harness, running
from tests.parity.matrix import CONFIG, checkpoint
from tests.store.nodes import Node, Stub, copied, copies_of, counters, node, turn, words
from tests.waiting import until
from workers.serving.kv_transfer import KVServer

FIRST, SECOND = words(1, 300), words(2, 5)


async def expected(folder: Path, kind: str, tp: int) -> list[list[int]]:
    engine = replace(CONFIG, model=checkpoint(kind))
    async with running(folder, num_workers=1, engine=engine, tp=tp) as cluster, cluster.channel() as channel:
        return [(await turn(Stub(channel), "s", tokens))[0] for tokens in (FIRST, SECOND)]


@asynccontextmanager
async def two_workers(folder: Path, kind: str, tp: int) -> AsyncIterator[tuple[Node, Harness, Stub]]:
    engine = replace(CONFIG, model=checkpoint(kind), kv_store=folder / "store")
    async with (
        node(folder / "store") as there,
        running(folder / "c", num_workers=2, engine=engine, tp=tp) as cluster,
        cluster.channel() as channel,
    ):
        yield there, cluster, Stub(channel)
        await cluster.assert_no_leak()


async def copied_by_all(cluster: Harness, worker: str) -> None:
    """Returns when followers too have copied what the leader has."""
    await copied(cluster, worker)
    ranks = [cluster.workers[worker]._copies, *(follower._copies for follower in cluster.followers[worker])]
    counts = [rank.counters for rank in ranks if rank is not None]
    await until(lambda: len({count["kv_pages_copied"] for count in counts}) == 1, 10, "all ranks' copies")


async def migrate(cluster: Harness, session: str) -> tuple[str, int]:
    """Returns its new worker, and how many pages it has there."""
    core, report, source = cluster.router.core, DrainReport(), cluster.pinned_to(session)
    (target,) = cluster.workers.keys() - {source}
    sender, receiver = core.fleet._links[f"{source}@1"], core.fleet._links[f"{target}@1"]
    pins = dict(await core.migrator.pins(sender))
    await core.migrator.migrate(session, pins[session], sender, receiver, report)
    core.sweeper.sweep(sender)
    assert report.sessions_migrated == 1
    return target, report.pages


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each chunk that a source sent, how many pages."""
    read, pages = KVServer.Read, list[int]()

    async def reading(self: KVServer, request: object, context: object) -> AsyncIterator[object]:
        async for chunk in read(self, request, context):  # type: ignore[arg-type]
            pages.append(len(chunk.crcs))
            yield chunk

    monkeypatch.setattr(KVServer, "Read", reading)
    return pages


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["full", "latent", "full + window", "window"])
async def test_only_what_was_not_copied_is_sent(kind: str, tp: int, tmp_path: Path, sent: list[int]) -> None:
    says = await expected(tmp_path / "x", kind, tp)
    async with two_workers(tmp_path, kind, tp) as (_, cluster, stub):
        assert (await turn(stub, "s", FIRST))[0] == says[0]
        await copied_by_all(cluster, cluster.pinned_to("s"))
        target, num_pages = await migrate(cluster, "s")
        spared = counters(cluster, target)["kv_pages_not_sent"]
        num_groups = len(cluster.workers[target]._leader.cache.groups)
        assert spared == num_pages - num_groups and sum(sent) == num_groups * tp, (
            "a group's last page, which is not full"
        )
        said, cached = await turn(stub, "s", SECOND)
        assert said == says[1] and cached >= 300 + 12 - 1


async def test_a_damaged_copy_is_sent_by_the_old_worker(tmp_path: Path, sent: list[int]) -> None:
    says = await expected(tmp_path / "x", "full", 1)
    async with two_workers(tmp_path, "full", 1) as (there, cluster, stub):
        assert (await turn(stub, "s", FIRST))[0] == says[0]
        await copied(cluster, cluster.pinned_to("s"))
        damaged = copies_of(there)[20]
        there.store.contents.arena[damaged.offset] ^= 1
        target, _ = await migrate(cluster, "s")
        seen = counters(cluster, target)
        assert seen["kv_copies_damaged"] == 1 and sum(sent) == 2, "that page, and the last one"
        assert (await turn(stub, "s", SECOND))[0] == says[1]


async def test_without_its_store_a_worker_takes_all_from_the_old_one(tmp_path: Path, sent: list[int]) -> None:
    says = await expected(tmp_path / "x", "full", 1)
    async with two_workers(tmp_path, "full", 1) as (there, cluster, stub):
        assert (await turn(stub, "s", FIRST))[0] == says[0]
        await copied(cluster, cluster.pinned_to("s"))
        await there.store.stop()
        await migrate(cluster, "s")
        assert sum(sent) == -(-311 // 4)
        assert (await turn(stub, "s", SECOND))[0] == says[1]
