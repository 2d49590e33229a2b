"""Sessions come back by copies of their pages: after an eviction, and when their worker has died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import store_pb2
from tests.harness import Harness, running
from tests.parity.matrix import CONFIG, checkpoint
from tests.store.nodes import (
    SAMPLING,
    SLAB,
    Node,
    Stub,
    client_of,
    copied,
    copies_of,
    counters,
    lose_device_kv,
    node,
    turn,
    words,
)
from tests.waiting import until
from workers.kv.page_events import PageEvents
from workers.models.parallel import Shard
from workers.serving import turn_loads
from workers.serving.page_copies import space_of
from workers.serving.turn_loads import TurnLoads
from workers.store import client
from workers.store.server import DiskConfig


async def stored(cluster: Harness) -> store_pb2.StoreStats:
    return await client_of(cluster).ask(stats=store_pb2.StoreStatsRequest())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", ["full", "latent", "full + window", "window"])
async def test_a_lost_workers_session_comes_back_by_its_copies(kind: str, tp: int, tmp_path: Path) -> None:
    plain = replace(CONFIG, model=checkpoint(kind), overlap_schedule=tp > 1)  # pages are written in either way
    engine = replace(plain, kv_store=tmp_path / "store")
    first, second = words(1, 300), words(2, 5)
    async with running(tmp_path / "a", num_workers=1, engine=plain, tp=tp) as cluster, cluster.channel() as channel:
        expected = [(await turn(Stub(channel), "s", tokens))[0] for tokens in (first, second)]
    async with (
        node(tmp_path / "store"),
        running(tmp_path / "b", num_workers=2, engine=engine, tp=tp) as cluster,
        cluster.channel() as channel,
    ):
        stub = Stub(channel)
        assert (await turn(stub, "s", first))[0] == expected[0]
        before = cluster.pinned_to("s")
        await copied(cluster, before)
        await cluster.lose_worker(before)
        said, cached = await turn(stub, "s", second)
        (after,) = cluster.workers
        assert said == expected[1] and cached >= 300 + 12 - 8, "all but the last pages came from the store"
        assert counters(cluster, after)["kv_tokens_loaded"] == cached
        await cluster.assert_no_leak()


@asynccontextmanager
async def one_worker(
    tmp_path: Path, *, disk: DiskConfig | None = None, **changes: Any
) -> AsyncIterator[tuple[Node, Harness, Stub]]:
    """A worker whose model has full attention and pages of 4 tokens, and its node's store."""
    engine = replace(CONFIG, model=checkpoint("full"), kv_store=tmp_path / "store", **changes)
    async with (
        node(tmp_path / "store", disk) as there,
        running(tmp_path / "c", num_workers=1, engine=engine) as cluster,
        cluster.channel() as channel,
    ):
        yield there, cluster, Stub(channel)
        await cluster.assert_no_leak()


async def expected(tmp_path: Path, *turns: list[int]) -> list[list[int]]:
    """What a session says whose KV is never lost."""
    plain = replace(CONFIG, model=checkpoint("full"))
    async with running(tmp_path / "x", num_workers=1, engine=plain) as cluster, cluster.channel() as channel:
        return [(await turn(Stub(channel), "s", tokens))[0] for tokens in turns]


def test_whatever_changes_a_pages_kv_changes_its_copies_names() -> None:
    configs = [CONFIG, replace(CONFIG, quantization="int8"), replace(CONFIG, dtype="bfloat16")]
    configs.append(replace(CONFIG, attention_backend="torch_native"))
    spaces = {space_of("layout", Shard(0, 2), config) for config in configs}
    spaces |= {space_of("layout", Shard(1, 2), CONFIG), space_of("another", Shard(0, 2), CONFIG)}
    assert len(spaces) == len(configs) + 2


async def test_an_evicted_session_is_loaded(tmp_path: Path) -> None:
    first, second = words(1, 300), words(2, 5)
    says = await expected(tmp_path, first, second)
    async with one_worker(tmp_path, max_total_tokens=400) as (_, cluster, stub):
        assert (await turn(stub, "s", first))[0] == says[0]
        await copied(cluster, "w0")
        await turn(stub, "other", words(3, 350))
        computed = counters(cluster, "w0")["computed_tokens"]
        assert (await turn(stub, "s", second))[0] == says[1]
        assert counters(cluster, "w0")["computed_tokens"] - computed < 30
        assert counters(cluster, "w0")["kv_tokens_loaded"] >= 200


async def test_what_is_evicted_while_a_load_is_planned_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load brings what the device lacks. What the device had may be gone when the load begins."""
    whole = words(1, 300)
    (says,) = await expected(tmp_path, [*whole, 3, 4])
    plan, planned = TurnLoads._plan, list[int]()
    async with one_worker(tmp_path) as (_, cluster, stub):
        await turn(stub, "other", whole)
        await copied(cluster, "w0")
        await lose_device_kv(cluster)
        await turn(stub, "s", whole[:100])

        async def planning(self: TurnLoads, wanted: Any, tokens: Any) -> Any:
            made = await plan(self, wanted, tokens)
            if wanted.session_id == "s":
                planned.append(wanted.known_len)
            if planned == [100]:
                await lose_device_kv(cluster)
                await turn(stub, "in its pages", words(9, 120))
            return made

        monkeypatch.setattr(TurnLoads, "_plan", planning)
        tokens = pb.TokenIds(ids=[*whole[100:], 3, 4])
        request = pb.GenerateRequest(session_id="s", tokens=tokens, sampling=SAMPLING, rewind_to=100)
        assert [token async for answer in stub.Generate(request) for token in answer.tokens] == says
        assert planned == [100, 0] and counters(cluster, "w0")["kv_loads_failed"] == 1, "then it is asked for all"


async def test_a_drain_counts_the_session_whose_turn_it_preempts_while_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load is an import. Until it ends its session is not idle, and was not in the list of what to migrate."""
    whole, loading = words(1, 300), asyncio.Event()

    async def hang(*_: object) -> int:
        loading.set()
        await asyncio.Event().wait()
        return 0

    async with one_worker(tmp_path) as (_, cluster, stub):
        await turn(stub, "other", whole)
        await copied(cluster, "w0")
        await lose_device_kv(cluster)
        await turn(stub, "s", whole[:100])
        monkeypatch.setattr(turn_loads, "fetch", hang)
        tokens = pb.TokenIds(ids=whole[100:])
        preempted = stub.Generate(pb.GenerateRequest(session_id="s", tokens=tokens, sampling=SAMPLING, rewind_to=100))
        await asyncio.wait_for(loading.wait(), 10)
        report = await cluster.router.core.migrator.drain("w0", 0.0)
        assert (report["turns_preempted"], report["sessions_left"]) == (1, 1), report
        preempted.cancel()


async def test_a_flipped_bit_is_found_counted_and_computed(tmp_path: Path) -> None:
    first, second = words(1, 300), words(2, 5)
    says = await expected(tmp_path, first, second)
    async with one_worker(tmp_path) as (there, cluster, stub):
        assert (await turn(stub, "s", first))[0] == says[0]
        await copied(cluster, "w0")
        damaged = copies_of(there)[20]
        with there.store._arena.open("r+b") as arena:
            arena.seek(damaged.offset + 5)
            (byte,) = arena.read(1)
            arena.seek(damaged.offset + 5)
            arena.write(bytes([byte ^ 4]))
        await lose_device_kv(cluster)
        assert (await turn(stub, "s", second))[0] == says[1]
        await copied(cluster, "w0")
        seen = counters(cluster, "w0")
        assert (
            seen["kv_copies_damaged"] == seen["kv_loads_failed"] == there.store.contents.copies.counters["damaged"] == 1
        )
        again = there.store.contents.copies._copies[damaged.key]
        assert again is not damaged and again.crc == damaged.crc, "it was computed, and copied again"


async def test_a_page_that_may_have_been_written_meanwhile_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageEvents, "is_unchanged", lambda self, filled, num_drops: filled.page % 2 == 0)
    async with one_worker(tmp_path) as (there, cluster, stub):
        await turn(stub, "s", words(1, 300))
        await copied(cluster, "w0")
        assert len(copies_of(there)) == counters(cluster, "w0")["kv_pages_copied"] == 39
        assert there.store.contents.copies.num_bytes_used == sum(copy.size for copy in copies_of(there))


async def test_a_release_and_a_flush_leave_no_copy(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as (there, cluster, stub):
        await turn(stub, "a", words(1, 300))
        await turn(stub, "b", words(2, 300))
        await stub.Release(pb.ReleaseRequest(session_id="a"))  # perhaps before its copies are made
        await turn(stub, "b", [9, 8, 7])
        await copied(cluster, "w0")
        assert {copy.owner for copy in copies_of(there)} == {"b"}
        await asyncio.wrap_future(cluster.workers["w0"]._leader.flush())
        await until(lambda: not copies_of(there), 5, "copies to go")


async def test_a_release_leaves_the_copies_that_another_session_uses(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as (there, cluster, stub):
        await turn(stub, "a", words(1, 200))
        await copied(cluster, "w0")
        alone = len(copies_of(there))
        await lose_device_kv(cluster)
        await turn(stub, "b", [*words(1, 200), 3, 4])
        await copied(cluster, "w0")
        assert counters(cluster, "w0")["kv_tokens_loaded"] == 200
        await stub.Release(pb.ReleaseRequest(session_id="a"))
        await until(lambda: len(copies_of(there)) < alone + 3, 5, "a's own copies to go")
        left = copies_of(there)
        assert len(left) >= 50 and all(copy.is_shared or copy.owner == "b" for copy in left)


async def test_a_store_that_dies_costs_no_turn_and_the_next_one_is_used(tmp_path: Path) -> None:
    first, second = words(1, 300), words(2, 5)
    says = await expected(tmp_path, first, second)
    async with one_worker(tmp_path) as (there, cluster, stub):
        await there.store.stop()
        assert (await turn(stub, "s", first))[0] == says[0]
        await there.start()
        await until(lambda: client_of(cluster).arena is not None, 10, "the rank to find the new store")
        await lose_device_kv(cluster)
        assert (await turn(stub, "s", second))[0] == says[1], "the new store has nothing"
        await copied(cluster, "w0")
        await lose_device_kv(cluster)
        await turn(stub, "s", [7])
        assert counters(cluster, "w0")["kv_tokens_loaded"] >= 300


async def test_a_store_that_hangs_delays_a_turn_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = words(1, 300), words(2, 5)
    says = await expected(tmp_path, first, second)
    monkeypatch.setattr(client, "TIMEOUT_S", 0.3)
    async with one_worker(tmp_path) as (there, cluster, stub):
        assert (await turn(stub, "s", first))[0] == says[0]
        await copied(cluster, "w0")
        await lose_device_kv(cluster)
        there.store.hangs = True
        assert (await turn(stub, "s", second))[0] == says[1]
        assert counters(cluster, "w0")["kv_loads_failed"] == 1


async def test_a_full_arena_keeps_what_was_used_last(tmp_path: Path) -> None:
    async with one_worker(tmp_path) as (there, cluster, stub):
        for i in range(20):
            await turn(stub, f"s{i}", words(50 + i, 400))
            await copied(cluster, "w0")
        stats = await stored(cluster)
        assert stats.counters["evicted"] > 0 and stats.bytes_used <= stats.bytes_total
        owners = {copy.owner for copy in copies_of(there)}
        assert "s0" not in owners and "s19" in owners


async def on_disk(there: Node, count: int) -> None:
    """Returns when so many copies are on the disk."""
    disk = there.store.contents.disk
    assert disk is not None
    await until(lambda: disk.counters["disk_stored"] >= count, 10, "copies on the disk")


async def test_a_session_is_loaded_from_the_disk_when_the_store_was_restarted(tmp_path: Path) -> None:
    first, second = words(1, 300), words(2, 5)
    says = await expected(tmp_path, first, second)
    disk = DiskConfig(tmp_path / "disk", 16 * SLAB)
    async with one_worker(tmp_path, disk=disk) as (there, cluster, stub):
        assert (await turn(stub, "s", first))[0] == says[0]
        await copied(cluster, "w0")
        await on_disk(there, 75)
        await there.store.stop()
        await until(lambda: client_of(cluster).arena is None, 10, "the rank to miss the store")
        await there.start()
        await until(lambda: client_of(cluster).arena is not None, 10, "the rank to find the new store")
        await lose_device_kv(cluster)
        assert (await turn(stub, "s", second))[0] == says[1]
        assert counters(cluster, "w0")["kv_tokens_loaded"] >= 300


async def test_what_memory_has_no_room_for_is_on_the_disk(tmp_path: Path) -> None:
    says = await expected(tmp_path, words(50, 400), [3, 4, 5])
    disk = DiskConfig(tmp_path / "disk", 160 * SLAB)
    async with one_worker(tmp_path, disk=disk) as (there, cluster, stub):
        for i in range(20):
            await turn(stub, "s" if not i else f"s{i}", words(50 + i, 400))
            await copied(cluster, "w0")
            await on_disk(there, 100 * (i + 1))
        await lose_device_kv(cluster)
        assert "s" not in {copy.owner for copy in copies_of(there)}
        assert (await turn(stub, "s", [3, 4, 5]))[0] == says[1]
        assert counters(cluster, "w0")["kv_tokens_loaded"] >= 400


async def test_a_released_session_is_gone_from_the_disk(tmp_path: Path) -> None:
    disk = DiskConfig(tmp_path / "disk", 16 * SLAB)
    async with one_worker(tmp_path, disk=disk) as (there, cluster, stub):
        for name, seed in (("a", 1), ("b", 2)):
            await turn(stub, name, words(seed, 200))
        await copied(cluster, "w0")
        await on_disk(there, 100)
        await stub.Release(pb.ReleaseRequest(session_id="a"))
        assert there.store.contents.disk is not None
        segments = there.store.contents.disk._segments
        await until(lambda: segments.owners() == ["b"], 5, "a's copies to go")


async def test_a_disk_that_fails_costs_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = words(1, 300), words(2, 5)
    says = await expected(tmp_path, first, second)
    disk = DiskConfig(tmp_path / "disk", 16 * SLAB)
    async with one_worker(tmp_path, disk=disk) as (there, cluster, stub):

        def fail(*given: Any) -> None:
            raise OSError(5, "Input/output error")

        assert there.store.contents.disk is not None
        for name in ("append", "read", "release"):
            monkeypatch.setattr(there.store.contents.disk._segments, name, fail)
        assert (await turn(stub, "s", first))[0] == says[0]
        await copied(cluster, "w0")
        await until(lambda: there.store.contents.disk.counters["disk_errors"] > 0, 5, "the disk to fail")
        await lose_device_kv(cluster)
        assert (await turn(stub, "s", second))[0] == says[1]
        assert counters(cluster, "w0")["kv_tokens_loaded"] >= 300, "memory has them"
        await stub.Release(pb.ReleaseRequest(session_id="s"))
