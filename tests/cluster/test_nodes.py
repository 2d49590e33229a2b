"""The supervisor on separate Ray clusters: a rank that diverges, a node that dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.exceptions import RayActorError

from cluster.config import Config
from cluster.ray_backend.cluster import Cluster
from cluster.ray_backend.connect import NAMESPACE, connect
from holdfast import tls
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from tests.waiting import until

START_DEADLINE_S = 90.0
LONG_TURN = 400
"""Tokens: enough for a fault to meet the turn on a busy machine too."""
PAGE_SIZE = Config.model_fields["page_size"].default
LONG = " ".join(f"line {i} of a long text;" for i in range(80))


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[tuple[Cluster, session_pb2_grpc.SessionServiceStub]]:
    cluster = Cluster(config)
    try:
        await cluster.start()
        async with grpc.aio.insecure_channel(cluster.grpc_url.removeprefix("grpc://")) as channel:
            yield cluster, session_pb2_grpc.SessionServiceStub(channel)
    finally:
        await cluster.stop()
        ray.shutdown()
        assert tls.identity() is None, "this process is of no cluster any more"


def config(tmp_path: Path, **settings: Any) -> Config:
    return Config(port=0, grpc_port=0, device="cpu", journal_path=tmp_path / "journal.db", **settings)


async def tokens_of(
    stub: session_pb2_grpc.SessionServiceStub,
    session: str,
    on_token: int = -1,
    act: Callable[[], Any] = lambda: None,
    *,
    num_tokens: int = 60,
) -> list[int]:
    sampling = pb.Sampling(temperature=0.8, seed=4, max_tokens=num_tokens, ignore_eos=True)
    tokens: list[int] = []
    async for answer in stub.Generate(pb.GenerateRequest(session_id=session, text="Return the", sampling=sampling)):
        tokens += answer.tokens
        if len(tokens) == on_token:
            act()
    assert len(tokens) == num_tokens
    return tokens


async def says(stub: session_pb2_grpc.SessionServiceStub, session: str, text: str) -> str:
    sampling = pb.Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    request = pb.GenerateRequest(session_id=session, text=text, sampling=sampling)
    return "".join([answer.text async for answer in stub.Generate(request)])


async def idle_session_on(cluster: Cluster, stub: session_pb2_grpc.SessionServiceStub, worker: Any) -> tuple[str, str]:
    """A session with a long history, and that history."""
    for i in range(20):
        text = f"{i} {LONG}"
        text += await says(stub, f"idle-{i}", text)
        if await worker_of(cluster, stub, f"idle-{i}") is worker:
            return f"idle-{i}", text
    raise AssertionError(f"no session was placed on {worker.name}")


def events(cluster: Cluster, worker: Any) -> Counter[str]:
    """What the worker's engine and its node's KV store did."""
    rows = httpx.get(f"{cluster.url}/holdfast/workers", timeout=20).json()
    row = next(row for row in rows if row["worker_id"] == worker.name)
    counts = row["counters"] | (row.get("kv_store") or {}).get("counters", {})
    return Counter({name: int(count) for name, count in counts.items()})


async def worker_of(cluster: Cluster, stub: session_pb2_grpc.SessionServiceStub, session: str) -> Any:
    pin = (await stub.Get(pb.GetRequest(session_id=session))).worker_id
    return next(worker for worker in cluster.workers if worker.name == pin)


async def num_copies_of(cluster: Cluster, stub: session_pb2_grpc.SessionServiceStub, session: str, worker: Any) -> int:
    """How many copies two ranks of the worker make of a session's filled pages; none if it is on another one."""
    found = await stub.Get(pb.GetRequest(session_id=session))
    return 2 * ((found.num_tokens - 1) // PAGE_SIZE) if found.worker_id == worker.name else 0


async def serving_again(cluster: Cluster, worker: Any, before: Any) -> None:
    await until(lambda: worker.address not in (None, before), START_DEADLINE_S, f"{worker.name} to serve again")
    while worker.address.name not in await cluster.routers[0].ready_workers():
        await asyncio.sleep(0.05)


# Each runs in the process of rank 1, in the middle of a turn.


def flip_a_refcount(actor: Any) -> None:
    """A bit of its memory turns over."""
    cache = actor._server.follower.rank.cache
    slot = next(slot for slot in cache.slots.values() if slot.running)
    cache.groups[0].pool.refcounts[slot.tables[0].pages[-1]] ^= 4


def swap_a_page(actor: Any) -> None:
    """It would read and write another page's KV."""
    cache = actor._server.follower.rank.cache
    slot = next(slot for slot in cache.slots.values() if slot.running)
    cache._cut(slot, 0)
    cache.extend(slot.session_id, 40)


def fail_to_compute(actor: Any) -> None:
    """Its peer would wait in a collective."""

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    actor._server.follower.rank.launch = fail


async def disturb(
    cluster: Cluster,
    stub: session_pb2_grpc.SessionServiceStub,
    session: str,
    begun: asyncio.Event,
    fault: Callable[[Any], None],
) -> tuple[Any, Any]:
    """Once ``begun``, inject the fault into rank 1 of the session's worker. Returns the worker and its address."""
    await begun.wait()
    worker = await worker_of(cluster, stub, session)
    before = worker.address
    with contextlib.suppress(RayActorError):  # the rank may be gone before it has answered
        await worker._actors[1].__ray_call__.remote(fault)
    return worker, before


async def test_a_rank_that_goes_wrong_costs_a_pause_only(tmp_path: Path) -> None:
    settings = config(tmp_path, workers=2, tp=2)
    connect(settings)
    async with running(settings) as (cluster, stub):
        calm = await tokens_of(stub, "calm", num_tokens=LONG_TURN)
        for fault in (flip_a_refcount, swap_a_page, fail_to_compute):
            session = f"storm-{fault.__name__}"
            begun = asyncio.Event()
            disturbed = asyncio.create_task(disturb(cluster, stub, session, begun, fault))
            storm = await tokens_of(stub, session, 10, begun.set, num_tokens=LONG_TURN)
            assert storm == calm, "nothing wrong reached the client"
            worker, before = await disturbed
            await serving_again(cluster, worker, before)
            assert await worker_of(cluster, stub, session) is not worker, "the session went on elsewhere"


async def test_a_fresh_cluster_is_fresh_beside_another_one(tmp_path: Path) -> None:
    other = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        connect(config(tmp_path, workers=3))
        assert ray.get_runtime_context().gcs_address != other.address
        assert ray.cluster_resources()["CPU"] == 3
    finally:
        ray.shutdown()
        other.shutdown()


async def test_a_node_dies_and_its_worker_comes_back_on_another(tmp_path: Path) -> None:
    nodes = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    first, _ = (nodes.add_node(num_cpus=2) for _ in range(2))
    settings = config(tmp_path, workers=2, tp=2, address=nodes.address, rank_lease_s=4.0, hicache_size=0.05)
    try:
        ray.init(address=nodes.address, namespace=NAMESPACE, logging_level="ERROR")
        async with running(settings) as (cluster, stub):
            calm = await tokens_of(stub, "calm")
            homes = {w.name: {process.node_id for process in w._processes} for w in cluster.workers}
            assert all(len(home) == 1 for home in homes.values()), "STRICT_PACK: a worker's ranks on one node"
            victim = next(w for w in cluster.workers if homes[w.name] == {first.node_id})
            before = victim.address
            idle, text = await idle_session_on(cluster, stub, victim)
            num_copies = sum([await num_copies_of(cluster, stub, session, victim) for session in ("calm", idle)])
            await until(
                lambda: events(cluster, victim)["replicated"] >= num_copies, START_DEADLINE_S, "copies on another node"
            )
            lost = asyncio.to_thread(nodes.remove_node, first, False)
            storms = [f"storm-{i}" for i in range(3)]
            streams = [asyncio.create_task(tokens_of(stub, storm)) for storm in storms]
            await lost
            assert [await stream for stream in streams] == [calm] * 3
            survivor = next(w for w in cluster.workers if w is not victim)
            assert await says(stub, idle, " And then") == await says(stub, "again", f"{text} And then")
            assert events(cluster, survivor)["kv_tokens_loaded"] > 400
            nodes.add_node(num_cpus=2)
            await serving_again(cluster, victim, before)
            assert {process.node_id for process in victim._processes} != {first.node_id}
            assert await tokens_of(stub, "after") == calm
        # Over nodes: each rank has one to itself.
        ray.init(address=nodes.address, namespace=NAMESPACE, logging_level="ERROR")
        spread = config(tmp_path / "spread", workers=1, tp=2, tp_placement="SPREAD", address=nodes.address)
        spread.journal_path.parent.mkdir()
        async with running(spread) as (cluster, stub):
            assert len({process.node_id for process in cluster.workers[0]._processes}) == 2
            assert await tokens_of(stub, "over nodes") == calm
    finally:
        nodes.shutdown()
