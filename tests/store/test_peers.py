"""Stores of several nodes: each copies its pages to others, and reads there what it lacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import store_pb2, store_pb2_grpc
from tests.harness import Harness, running
from tests.parity.matrix import CONFIG, checkpoint
from tests.store.nodes import Node, Stub, copied, copies_of, counters, lose_device_kv, node, turn, words
from tests.waiting import until
from workers.store.copies import NOBODY
from workers.store.peer_server import PeerServer

FIRST, SECOND = words(1, 300), words(2, 5)


async def introduce(nodes: dict[str, Node], num_replicas: int = 1) -> None:
    """What the supervisor does when nodes come or go."""
    addresses = {name: each.address for name, each in nodes.items()}
    for name, each in nodes.items():
        await each.store.peers.set_nodes(name, addresses, num_replicas)


@asynccontextmanager
async def three_nodes(
    tmp_path: Path, workers: Iterable[str] = "ac", kind: str = "full", tp: int = 1
) -> AsyncIterator[tuple[dict[str, Node], Harness, Stub]]:
    """Nodes a, b and c, where a's copies are on b too, b's on c, and c's on a. Workers ``wa``, ..."""
    async with AsyncExitStack() as stack:
        nodes = {name: await stack.enter_async_context(node(tmp_path / name)) for name in "abc"}
        await introduce(nodes)
        cluster = await stack.enter_async_context(running(tmp_path / "c0", num_workers=0))
        config = replace(CONFIG, model=checkpoint(kind))
        for name in workers:
            await cluster.start_worker(f"w{name}", 1, replace(config, kv_store=tmp_path / name), tp, node=name)
        for link in cluster.router.core.fleet.alive():
            await until(lambda link=link: link.home.replicas, 10, "workers to say where their copies are")
        yield nodes, cluster, Stub(await stack.enter_async_context(cluster.channel()))
        await cluster.assert_no_leak()


async def lose_node(nodes: dict[str, Node], cluster: Harness, name: str, *, announced: bool = True) -> None:
    """As when its machine loses power."""
    gone = nodes.pop(name)
    await cluster.lose_worker(f"w{name}")
    await gone.store.stop()
    if announced:
        await introduce(nodes)


async def begin_on(cluster: Harness, stub: Stub, session: str, worker: str, tokens: list[int]) -> list[int]:
    """A session's first turn, on that worker."""
    fleet = cluster.router.core.fleet
    with patch.object(fleet, "admitting", lambda: [fleet.worker(worker)]):
        said, _ = await turn(stub, session, tokens)
    assert cluster.pinned_to(session) == worker
    await copied(cluster, worker)
    return said


async def replicated(source: Node, target: Node) -> None:
    """Returns when the target has all that the source has."""

    def has_all() -> bool:
        return {copy.key for copy in copies_of(source)} <= {copy.key for copy in copies_of(target)}

    await until(has_all, 10, "replicas")


async def plain(tmp_path: Path, kind: str = "full", tp: int = 1) -> list[list[int]]:
    """What a session says whose KV is never lost."""
    engine = replace(CONFIG, model=checkpoint(kind))
    async with running(tmp_path / "x", num_workers=1, engine=engine, tp=tp) as cluster, cluster.channel() as channel:
        return [(await turn(Stub(channel), "s", tokens))[0] for tokens in (FIRST, SECOND)]


@pytest.mark.parametrize(("kind", "tp"), [("full", 1), ("latent", 2), ("full + window", 2), ("window", 1)])
async def test_a_lost_nodes_session_is_read_from_the_node_that_has_its_copies(
    kind: str, tp: int, tmp_path: Path
) -> None:
    says = await plain(tmp_path, kind, tp)
    async with three_nodes(tmp_path, "ac", kind, tp) as (nodes, cluster, stub):
        assert await begin_on(cluster, stub, "s", "wa", FIRST) == says[0]
        await replicated(nodes["a"], nodes["b"])
        assert not copies_of(nodes["c"])
        await lose_node(nodes, cluster, "a")
        said, cached = await turn(stub, "s", SECOND)
        seen = counters(cluster, "wc")
        assert said == says[1] and cached >= 300 + 12 - 8
        assert seen["kv_tokens_loaded"] == cached and seen["kv_pages_from_peers"] > 0
        await replicated(nodes["c"], nodes["b"])


async def test_a_router_that_starts_after_a_node_was_lost_knows_where_its_copies_are(tmp_path: Path) -> None:
    says = await plain(tmp_path)
    async with three_nodes(tmp_path, "ac") as (nodes, cluster, stub):
        await begin_on(cluster, stub, "s", "wa", FIRST)
        await replicated(nodes["a"], nodes["b"])
        homes = cluster.router.core.homes
        await until(lambda: "wa@1" in homes._homes, 10, "the journal to have it")
        await lose_node(nodes, cluster, "a")
        config = cluster.router.config
        cluster.lose_router()
        await cluster.start_router(replace(config, port=0, grpc_port=0))
        await cluster.announce()
        async with cluster.channel(-1) as channel:
            said, cached = await turn(Stub(channel), "s", SECOND)
        assert said == says[1] and cached >= 300 + 12 - 8, "not computed again"


async def test_a_lost_nodes_session_goes_on_where_its_copies_are(tmp_path: Path) -> None:
    says = await plain(tmp_path)
    async with three_nodes(tmp_path, "abc") as (nodes, cluster, stub):
        for i in range(3):  # what else speaks for wc: b's worker has more to do
            await begin_on(cluster, stub, f"other-{i}", "wb", words(10 + i, 20))
        assert await begin_on(cluster, stub, "s", "wa", FIRST) == says[0]
        await replicated(nodes["a"], nodes["b"])
        wb = next(link for link in cluster.router.core.fleet.alive() if link.address.worker_id == "wb")
        await until(lambda: wb.stats.sessions == 3, 10, "a beat")
        await lose_node(nodes, cluster, "a", announced=False)
        assert (await turn(stub, "s", SECOND))[0] == says[1]
        assert cluster.pinned_to("s") == "wb"
        seen = counters(cluster, "wb")
        assert seen["kv_pages_from_memory"] >= 76 and not seen["kv_pages_from_peers"]
        await introduce(nodes)
        await replicated(nodes["b"], nodes["c"])


async def test_a_store_that_was_replaced_gets_its_copies_back_from_its_replicas(tmp_path: Path) -> None:
    says = await plain(tmp_path)
    async with three_nodes(tmp_path, "a") as (nodes, cluster, stub):
        assert await begin_on(cluster, stub, "s", "wa", FIRST) == says[0]
        await replicated(nodes["a"], nodes["b"])
        await nodes["a"].store.stop()
        copies = cluster.workers["wa"]._copies
        assert copies is not None
        await until(lambda: copies.client.arena is None, 10, "the rank to miss the store")
        await nodes["a"].start()
        await introduce(nodes)
        await until(lambda: copies.client.arena is not None, 10, "the rank to find the new store")
        await lose_device_kv(cluster, "wa")
        assert (await turn(stub, "s", SECOND))[0] == says[1]
        assert counters(cluster, "wa")["kv_pages_from_peers"] >= 75


async def test_a_release_and_a_flush_leave_no_replica(tmp_path: Path) -> None:
    async with three_nodes(tmp_path, "a") as (nodes, cluster, stub):
        for name, seed in (("s", 1), ("t", 2)):
            await begin_on(cluster, stub, name, "wa", words(seed, 200))
        await stub.Release(pb.ReleaseRequest(session_id="s"))  # perhaps while its copies are sent
        await replicated(nodes["a"], nodes["b"])
        await until(lambda: {copy.owner for copy in copies_of(nodes["b"])} == {"t"}, 5, "the replicas of s to go")
        await asyncio.wrap_future(cluster.workers["wa"]._leader.flush())
        await until(lambda: not copies_of(nodes["a"]) and not copies_of(nodes["b"]), 5, "all to go")


async def test_a_released_sessions_replicas_stay_that_another_session_uses(tmp_path: Path) -> None:
    async with three_nodes(tmp_path, "a") as (nodes, cluster, stub):
        await begin_on(cluster, stub, "s", "wa", words(1, 200))
        await replicated(nodes["a"], nodes["b"])
        await lose_device_kv(cluster, "wa")
        await turn(stub, "t", [*words(1, 200), 3, 4])
        await copied(cluster, "wa")
        await stub.Release(pb.ReleaseRequest(session_id="s"))

        def kept() -> bool:
            owners = [copy.owner for copy in copies_of(nodes["b"])]
            return "s" not in owners and owners.count(NOBODY) >= 50

        await until(kept, 10, "what t uses to be copied again")


async def test_a_damaged_copy_is_not_taken_by_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with three_nodes(tmp_path, "a") as (nodes, cluster, stub):
        await introduce(nodes, num_replicas=0)
        await begin_on(cluster, stub, "s", "wa", FIRST)
        damaged = copies_of(nodes["a"])[20]
        nodes["a"].store.contents.data(damaged)[5] ^= 4
        await introduce(nodes)
        there = nodes["b"].store.contents.copies
        await until(lambda: len(there) == len(copies_of(nodes["a"])) - 1, 10, "the others")
        assert not there.has(damaged.key) and there.counters["damaged"] == 1


async def test_a_peer_that_hangs_or_breaks_off_costs_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = await plain(tmp_path)
    monkeypatch.setattr("workers.store.peers.TIMEOUT_S", 0.5)
    fetch = PeerServer.Fetch
    breaks = True

    async def broken(self: PeerServer, request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in fetch(self, request, context):
            if breaks:
                message.data = message.data[: len(message.data) // 2]
                yield message
                await asyncio.sleep(60)

    monkeypatch.setattr(PeerServer, "Fetch", broken)
    async with three_nodes(tmp_path, "ac") as (nodes, cluster, stub):
        assert await begin_on(cluster, stub, "s", "wa", FIRST) == says[0]
        await replicated(nodes["a"], nodes["b"])
        await lose_node(nodes, cluster, "a")
        assert (await turn(stub, "s", SECOND))[0] == says[1]
        assert counters(cluster, "wc")["kv_loads_failed"] == 1


async def test_a_peer_that_leaves_while_it_is_asked_has_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    async def hangs(self: PeerServer, request: Any, context: Any) -> None:
        asked.append("Find")
        await asyncio.sleep(60)

    async def hangs_in_a_stream(self: PeerServer, request: Any, context: Any) -> AsyncIterator[Any]:
        asked.append("Fetch")
        await asyncio.sleep(60)
        yield

    monkeypatch.setattr(PeerServer, "Find", hangs)
    monkeypatch.setattr(PeerServer, "Fetch", hangs_in_a_stream)
    monkeypatch.setattr("workers.store.peers.FIND_TIMEOUT_S", 30.0)
    async with node(tmp_path / "a") as a, node(tmp_path / "b") as b:
        await introduce({"a": a, "b": b})
        peers, key = a.store.peers, b"x" * 40
        (link,) = peers._links.values()
        finding, fetching = asyncio.create_task(peers.find("b", [key])), asyncio.create_task(link.fetch([key], "s"))
        await until(lambda: sorted(asked) == ["Fetch", "Find"], 10, "the questions to arrive")
        await introduce({"a": a})
        assert await finding == set() and await fetching == []
        assert await link.find([key]) == [] and await link.fetch([key], "s") == [], "of a link that is closed"


async def test_copies_that_are_none_are_refused(tmp_path: Path) -> None:
    async with node(tmp_path / "a") as there, grpc.aio.insecure_channel(there.address) as channel:
        stub = store_pb2_grpc.KVStorePeerServiceStub(channel)
        keys = store_pb2.KeysOfPrefix(prefix=b"x", keys=bytes(32))
        wrong = [
            store_pb2.PeerCopies(),
            store_pb2.PeerCopies(keys=keys, data=bytes(7), crcs=[1, 2], session_ids=["s", "s"]),
            store_pb2.PeerCopies(keys=keys, data=bytes(8), crcs=[1], session_ids=["s", "s"]),
        ]
        for message in wrong:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.Put(message)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not copies_of(there)


async def test_copies_are_made_while_nodes_come_and_go(tmp_path: Path) -> None:
    async with node(tmp_path / "a") as a, node(tmp_path / "b") as b, node(tmp_path / "c") as c:
        await introduce({"a": a, "b": b})
        peers, contents = a.store.peers, a.store.contents
        coming = asyncio.create_task(peers.set_nodes("a", {"a": a.address, "c": c.address}, 1))
        copy = contents.put(b"x" * 40, "s", 0, memoryview(bytes(64)), is_replica=False)
        while not coming.done():
            assert copy is not None
            peers.add(copy)
            await asyncio.sleep(0)
        await coming
        assert peers.replicas == ["c"]
