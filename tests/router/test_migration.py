"""Sessions migrate with their KV, page by page and rank by rank, or stay complete where they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import workers.serving.kv_transfer as rpc
from holdfast.errors import JournalUnavailable, NoWorkerAvailable, SessionReleased, StaleEpoch
from holdfast.tokens import unpack_tokens
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router.fleet.link import WorkerLink
from router.fleet.migration import DrainReport
from tests.harness import ENGINE, Harness, running
from tests.waiting import until
from workers.serving.bandwidth import REMEASURE_EVERY
from workers.serving.importer import Importer

PROMPT = [100 + i % 400 for i in range(330)]
TURN = {"temperature": 0.8, "seed": 4, "max_tokens": 24, "ignore_eos": True}


async def turn(stub: Any, session: str, ids: list[int]) -> tuple[list[int], int]:
    """A turn's tokens, and how many of its input were cached."""
    request = pb.GenerateRequest(session_id=session, tokens=pb.TokenIds(ids=ids), sampling=pb.Sampling(**TURN))
    tokens, cached = [], 0
    async for answer in stub.Generate(request):
        tokens += answer.tokens
        cached = answer.cached_tokens
    return tokens, cached


@asynccontextmanager
async def two_workers(tmp_path: Path, sessions: list[str], **settings: Any) -> AsyncIterator[tuple[Harness, Any, Any]]:
    """``sessions`` live on w0, each with a turn; w1 came later. Gives also what an undisturbed session says next."""
    async with running(tmp_path, num_workers=1, **settings) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        await turn(stub, "calm", PROMPT)
        expected, _ = await turn(stub, "calm", [7, 8, 9])
        await stub.Release(pb.ReleaseRequest(session_id="calm"))
        for session in sessions:
            await turn(stub, session, PROMPT)
        tp = len(cluster.followers["w0"]) + 1
        await cluster.start_worker("w1", 1, settings.get("engine", ENGINE), tp)
        yield cluster, stub, expected
        await swept(cluster)
        await cluster.assert_no_leak()


async def swept(cluster: Harness) -> None:
    await until(lambda: not cluster.router.core.sweeper._sweeps, 5, "what was left behind to be dropped")


async def migrate(cluster: Harness, session: str = "s", source: str = "w0", target: str = "w1") -> DrainReport:
    core, report = cluster.router.core, DrainReport()
    sender, receiver = core.fleet._links[f"{source}@1"], core.fleet._links[f"{target}@1"]
    pins = dict(await core.migrator.pins(sender))
    await core.migrator.migrate(session, pins[session], sender, receiver, report)
    core.sweeper.sweep(sender)
    return report


def slots(cluster: Harness, worker: str) -> set[str]:
    ranks = [cluster.workers[worker]._leader.cache, *(f.follower.rank.cache for f in cluster.followers[worker])]
    assert len({frozenset(cache.slots) for cache in ranks}) == 1, "all ranks hold the same"
    return set(ranks[0].slots)


@pytest.mark.parametrize("tp", [1, 2])
async def test_a_drain_migrates_sessions_with_their_kv(tmp_path: Path, tp: int) -> None:
    engine = replace(ENGINE, rank_lease_s=10.0)
    async with two_workers(tmp_path, ["a", "b", "c"], tp=tp, engine=engine) as (cluster, stub, expected):
        async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as http:
            answer = (await http.post("/holdfast/workers/w0/drain", params={"timeout_s": 5})).json()
            metrics = (await http.get("/metrics")).text
            assert 'holdfast_migrations_total{outcome="migrated"} 3.0' in metrics
        assert (answer["sessions_migrated"], answer["sessions_left"], answer["turns_preempted"]) == (3, 0, 0), answer
        (page_bytes,) = cluster.workers["w1"]._leader.rank.kv.page_bytes
        assert answer["bytes"] == answer["pages"] * page_bytes * tp
        assert answer["pages"] <= 3 * -(-(len(PROMPT) + 24) // ENGINE.page_size), "a page comes once at most"
        await swept(cluster)
        assert slots(cluster, "w0") == set() and slots(cluster, "w1") == {"a", "b", "c"}
        for session in "abc":
            tokens, cached = await turn(stub, session, [7, 8, 9])
            assert tokens == expected, "its KV means what it meant"
            assert cached == len(PROMPT) + 24 - 1, "the last token's KV was never computed"
            assert (await stub.Get(pb.GetRequest(session_id=session))).epoch == 2


@pytest.fixture
def pages_sent(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Page by page; what the test says is awaited before the page of that number is sent."""
    read, before = rpc.KVServer.Read, {}

    async def sending(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        async for pages in read(self, request, context):
            first = unpack_tokens(pages.columns)[0]
            if first in before:
                await before.pop(first)()
            yield pages

    monkeypatch.setattr(rpc.KVServer, "Read", sending)
    monkeypatch.setattr(rpc, "CHUNK_BYTES", 1)
    return before


async def test_a_broken_transfer_resumes_where_it_broke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages_sent: dict[int, Any]
) -> None:
    async with two_workers(tmp_path, ["s"]) as (cluster, stub, expected):
        write, written = rpc.write_pages, []

        def noted(rank: Any, request: Any, group: int, columns: list[int], pages: bytes) -> None:
            written.extend(columns)
            write(rank, request, group, columns, pages)

        monkeypatch.setattr(rpc, "write_pages", noted)

        async def breaks() -> None:
            raise RuntimeError("the link broke")

        pages_sent |= {9: breaks, 17: breaks}
        assert (await migrate(cluster)).sessions_migrated == 1
        assert not pages_sent and written == [*range(23)], "nothing was read twice"
        assert (await turn(stub, "s", [7, 8, 9]))[0] == expected


async def test_a_damaged_page_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_workers(tmp_path, ["s", "t"]) as (cluster, stub, expected):
        check, seen = rpc._checked, []

        def damaged(chunk: Any, *rest: Any) -> Any:
            seen.append(unpack_tokens(chunk.columns)[0])
            if len(seen) in bad:
                chunk.data = chunk.data[:70] + bytes([chunk.data[70] ^ 1]) + chunk.data[71:]
            return check(chunk, *rest)

        monkeypatch.setattr(rpc, "_checked", damaged)
        bad: Any = {1}
        assert (await migrate(cluster)).sessions_migrated == 1
        assert seen[:2] == [0, 0], "a bit had flipped"
        assert (await turn(stub, "s", [7, 8, 9]))[0] == expected
        bad = range(1000)
        moved = await migrate(cluster, "t")
        assert moved.sessions_left == 1, "a link that damages all it carries carries no KV"
        await swept(cluster)
        assert "t" in slots(cluster, "w0") and "t" not in slots(cluster, "w1")
        assert (await turn(stub, "t", [7, 8, 9])) == (expected, len(PROMPT) + 24 - 1)


@pytest.mark.parametrize("dies", ["w0", "w1"])
async def test_a_worker_that_dies_during_a_migration_costs_no_session(
    tmp_path: Path, pages_sent: dict[int, Any], dies: str
) -> None:
    async with two_workers(tmp_path, ["s"]) as (cluster, stub, expected):
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.sleep(60)

        pages_sent[5] = hang
        moving = asyncio.create_task(migrate(cluster))
        await asyncio.wait_for(reached.wait(), 15)
        await cluster.lose_worker(dies)
        await cluster.announce()
        assert (await asyncio.wait_for(moving, 15)).sessions_left == 1
        assert (await turn(stub, "s", [7, 8, 9]))[0] == expected
        assert cluster.pinned_to("s") == ("w1" if dies == "w0" else "w0")


@pytest.mark.parametrize("comes", ["turn", "release"])
async def test_a_turn_or_release_preempts_the_migration_of_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    async with two_workers(tmp_path, ["s"]) as (cluster, stub, expected):
        fetch, reached, go_on = Importer._fetch, asyncio.Event(), asyncio.Event()

        async def slow(self: Any, *args: Any) -> int:
            reached.set()
            await go_on.wait()
            return await fetch(self, *args)

        monkeypatch.setattr(Importer, "_fetch", slow)
        moving = asyncio.create_task(migrate(cluster))
        await asyncio.wait_for(reached.wait(), 15)
        if comes == "turn":
            running = asyncio.create_task(turn(stub, "s", [7, 8, 9]))
            await until(lambda: cluster.router.core.sessions.running_turn("s"), 5, "the turn to begin")
            go_on.set()
            assert await running == (expected, len(PROMPT) + 24 - 1), "where it was"
            await moving  # before the turn or after it: either is whole
        else:
            await stub.Release(pb.ReleaseRequest(session_id="s"))
            assert slots(cluster, "w0") == set(), "its pages are free when the call returns, also those held to be read"
            go_on.set()
            assert (await moving).sessions_left == 1
            await swept(cluster)
            assert slots(cluster, "w0") == slots(cluster, "w1") == set()
            with pytest.raises(SessionReleased):
                await cluster.router.core.journal.load("s", "")


async def test_an_import_evicts_no_session(tmp_path: Path) -> None:
    engine = replace(ENGINE, max_total_tokens=640)
    async with two_workers(tmp_path, ["s"], engine=engine) as (cluster, stub, _):
        cluster.router.core.fleet._links["w0@1"].stats.draining = True
        links = cluster.router.core.fleet._links
        there = links.pop("w0@1")
        await turn(stub, "theirs", [5] * 400)
        links["w0@1"] = there
        assert (await migrate(cluster)).sessions_left == 1
        await swept(cluster)
        assert slots(cluster, "w1") == {"theirs"} and slots(cluster, "w0") == {"s"}


async def test_kv_that_is_recomputed_faster_is_not_migrated(tmp_path: Path) -> None:
    async with two_workers(tmp_path, ["s"]) as (cluster, _, _):
        target = cluster.workers["w1"]
        target._leader.pace.prefill_tokens_per_s, target._importer._bandwidth._bytes_per_s = 1e9, 1.0
        answers = [(await migrate(cluster)).sessions_migrated for _ in range(REMEASURE_EVERY)]
        assert answers == [0] * (REMEASURE_EVERY - 1) + [1], "but it is measured again, now and then"
        assert target._importer._bandwidth._bytes_per_s > 1.0


async def test_pages_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    async with two_workers(tmp_path, ["s"]) as (cluster, stub, expected):
        cluster.workers["w0"]._leader.rank.layout += " of another model"
        assert (await migrate(cluster)).sessions_left == 1
        assert (await turn(stub, "s", [7, 8, 9]))[0] == expected


async def test_a_journal_that_fails_leaves_the_session_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(tmp_path, ["s"]) as (cluster, stub, expected):

        async def fails(*_: object) -> int:
            raise JournalUnavailable("the disk is full")

        monkeypatch.setattr(cluster.router.core.journal, "move", fails)
        assert (await migrate(cluster)).sessions_left == 1
        await swept(cluster)
        assert slots(cluster, "w0") == {"s"} and slots(cluster, "w1") == set()
        assert (await turn(stub, "s", [7, 8, 9])) == (expected, len(PROMPT) + 24 - 1)


async def test_rebalancing_migrates_from_many_to_few(tmp_path: Path) -> None:
    names = [f"s{i}" for i in range(14)]
    async with two_workers(tmp_path, names) as (cluster, stub, expected):
        migrator = cluster.router.core.migrator

        async def counted() -> list[int]:
            counts = [len(slots(cluster, worker)) for worker in ("w0", "w1")]
            links = cluster.router.core.fleet._links
            await until(
                lambda: [links["w0@1"].stats.sessions, links["w1@1"].stats.sessions] == counts, 5, "beats to tell"
            )
            return counts

        assert await counted() == [14, 0]
        assert await migrator.rebalance(3) == 3, "no more at once than it may"
        await swept(cluster)
        assert await counted() == [11, 3]
        while await migrator.rebalance(100):
            await swept(cluster)
            await counted()
        assert await counted() == [7, 7]
        assert await migrator.rebalance(100) == 0, "and it stays so"
        for name in ("s0", "s13"):
            assert await turn(stub, name, [7, 8, 9]) == (expected, len(PROMPT) + 24 - 1)


async def test_a_late_migration_does_not_restore_a_released_session(tmp_path: Path) -> None:
    async with two_workers(tmp_path, ["s"]) as (cluster, stub, _):
        core = cluster.router.core
        w0, w1 = (core.fleet._links[f"w{i}@1"] for i in range(2))
        late = dict(await core.migrator.pins(w0))["s"]
        assert (await migrate(cluster)).sessions_migrated == 1
        await swept(cluster)
        assert (await migrate(cluster, "s", "w1", "w0")).sessions_migrated == 1, "back again, under a later epoch"
        await swept(cluster)
        # A migration that read the pin before all that asks a worker that no longer owns the session.
        with pytest.raises(StaleEpoch):
            await w1.import_session("s", late, w0.address.address, 5.0)
        await stub.Release(pb.ReleaseRequest(session_id="s"))
        assert slots(cluster, "w0") == slots(cluster, "w1") == set()


async def ended(iterator: Any) -> list[int]:
    return [token async for answer in iterator for token in answer.tokens]


@pytest.mark.parametrize("tp", [1, 2])
async def test_turns_of_a_draining_worker_migrate_their_kv_first(tmp_path: Path, tp: int) -> None:
    engine = replace(ENGINE, rank_lease_s=10.0)
    async with two_workers(tmp_path, ["a", "b"], tp=tp, engine=engine) as (cluster, stub, expected):
        core, target = cluster.router.core, cluster.workers["w1"]._leader
        long = pb.Sampling(**(TURN | {"max_tokens": 1000}))
        running = asyncio.create_task(
            ended(stub.Generate(pb.GenerateRequest(session_id="b", tokens=pb.TokenIds(ids=[7]), sampling=long)))
        )
        await until(lambda: core.sessions.running_turn("b"), 5, "the long turn to begin")
        # The worker drains without a router that migrates its sessions: only their own next turns do.
        source = core.fleet._links["w0@1"]
        draining = asyncio.create_task(source.drain(60.0, 10.0))
        await until(lambda: source.stats.draining, 20, "a worker to tell that it drains, however busy it is")
        assert await turn(stub, "a", [7, 8, 9]) == (expected, len(PROMPT) + 24 - 1)
        assert cluster.pinned_to("a") == "w1"
        # The preempted turn continues there, with the KV that its session had before it.
        assert await source.drain(0.0, 20.0) == 1 and await draining == 0
        await until(lambda: cluster.pinned_to("b") == "w1", 10, "the turn to move")
        assert len(await running) == 1000
        assert 1000 < target.counters["computed_tokens"] < 1100, "the output so far is computed, the history came as KV"


async def test_a_drain_waits_for_what_was_just_submitted(tmp_path: Path) -> None:
    async with two_workers(tmp_path, ["b"]) as (cluster, stub, _):
        core, worker = cluster.router.core, cluster.workers["w0"]
        worker._leader.call(lambda: time.sleep(1.0))  # a step that takes so long
        short = pb.Sampling(**(TURN | {"max_tokens": 5}))
        running = asyncio.create_task(
            ended(stub.Generate(pb.GenerateRequest(session_id="b", tokens=pb.TokenIds(ids=[7]), sampling=short)))
        )
        await until(lambda: worker._stream_of, 5, "the worker to have the turn")
        assert await core.fleet._links["w0@1"].drain(60.0, 10.0) == 0
        assert len(await running) == 5 and cluster.pinned_to("b") == "w0"


async def test_a_worker_that_ends_before_it_could_answer_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop(self: WorkerLink, timeout_s: float) -> None:
        raise NoWorkerAvailable("the call failed: UNAVAILABLE Socket closed")

    monkeypatch.setattr(WorkerLink, "stop", stop)
    async with running(tmp_path, num_workers=2) as cluster:
        report = await cluster.router.core.migrator.drain("w0", 0.0, stop=True)
        assert report["sessions_left"] == 0


async def test_calls_of_a_link_that_was_closed_say_that_the_worker_is_lost(tmp_path: Path) -> None:
    async with two_workers(tmp_path, []) as (cluster, _, _):
        link = cluster.routers[0].core.fleet.worker("w1")
        await link.close()
        with pytest.raises(NoWorkerAvailable, match="w1@1 is lost"):
            await link.slots(1.0)
