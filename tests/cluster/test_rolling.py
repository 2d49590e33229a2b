"""Workers and nodes that leave in order: their sessions migrate with their KV, and no client notices."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import ray
from openai import AsyncOpenAI
from ray.cluster_utils import Cluster as RayCluster

from cluster.ray_backend.connect import NAMESPACE
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from tests.cluster.served import HOLDFAST, Served, serving, stream
from tests.cluster.test_nodes import config, running, serving_again, tokens_of, worker_of
from tests.ports import free_port
from tests.waiting import until

SESSIONS = [f"s{i}" for i in range(5)]


async def follow_up(stub: session_pb2_grpc.SessionServiceStub, session: str) -> tuple[list[int], int, int]:
    """A short turn: its tokens, how many the session had with its input, and how many of these were cached."""
    sampling, tokens = pb.Sampling(max_tokens=8, ignore_eos=True), []
    async for answer in stub.Generate(pb.GenerateRequest(session_id=session, text=" and", sampling=sampling)):
        tokens += answer.tokens
    return tokens, answer.prompt_tokens, answer.cached_tokens


async def test_a_rolling_restart_costs_no_token_and_no_kv(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2", "--rebalance-per-s", "0") as served:
        target = served.router()["grpc"]
        async with (
            AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
            grpc.aio.insecure_channel(target) as channel,
        ):
            stub = session_pb2_grpc.SessionServiceStub(channel)
            calm = await stream(client, "calm")
            expected = await follow_up(stub, "calm")
            assert expected[2] >= expected[1] - 3, "all but what is new is cached"
            for session in SESSIONS:
                assert await stream(client, session) == calm
            before = {w["worker_id"]: int(w["incarnation"]) for w in served.workers()}
            restarting: list[asyncio.Task[list[dict[str, Any]]]] = []

            def restart() -> None:
                restarting.append(asyncio.create_task(asyncio.to_thread(served.ask, "restart", "--timeout", "0.2")))

            for number in range(100):
                assert await stream(client, f"storm-{number}", 5, restart if not restarting else int) == calm
                if restarting[0].done():
                    break
            drained = await restarting[0]
            after = {w["worker_id"]: int(w["incarnation"]) for w in served.workers()}
            assert all(after[name] > before[name] for name in before), "each is another incarnation"
            # Each session moved once or twice: from its worker, and from the one it had moved to.
            assert sum(answer["sessions_migrated"] for answer in drained) >= len(SESSIONS), drained
            for session in SESSIONS:
                assert await follow_up(stub, session) == expected, session
        assert all(rank["ok"] for report in served.ask("audit") for rank in report["ranks"])


async def test_a_cluster_on_a_node_of_its_own_is_upgraded_and_stopped_by_its_router_s_address(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2") as served:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            calm = await stream(client, "calm")
            (of_16,) = num_pages(served)
            upgrade = asyncio.create_task(asyncio.to_thread(served.ask, "upgrade", "--page-size", "4"))
            for number in range(200):
                assert await stream(client, f"storm-{number}") == calm
                if upgrade.done():
                    break
            assert len(await upgrade) == 2
            assert num_pages(served) == {4 * of_16}
            assert await stream(client, "after") == calm
        served.family += psutil.Process(served.process.pid).children(recursive=True)
        command = [*HOLDFAST, "stop", "--url", served.url]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert await asyncio.to_thread(served.process.wait, 60) == 0
        assert "holdfast: the cluster was stopped" in served.log_tail()


def num_pages(served: Served) -> set[int]:
    """Of the workers' pools."""
    return {int(group["total"]) for worker in served.workers() for group in worker["groups"]}


async def test_a_node_that_leaves_migrates_its_sessions(tmp_path: Path) -> None:
    nodes = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    settings = config(tmp_path, workers=2, address=nodes.address)
    settings.port = free_port()
    url = f"http://127.0.0.1:{settings.port}"
    command = [*HOLDFAST, "join", nodes.address, "--num-cpus", "1", "--url", url, "--timeout", "0.1"]
    node = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        ray.init(address=nodes.address, namespace=NAMESPACE, logging_level="ERROR")
        head = ray.get_runtime_context().get_node_id()
        await until(lambda: ray.cluster_resources().get("CPU") == 2, 60, "the node to join")
        async with running(settings) as (cluster, stub):
            calm = await tokens_of(stub, "calm")
            victim = next(w for w in cluster.workers if w._processes[0].node_id != head)
            before = victim.address
            # At once, for one after another they would go where their prompt is cached.
            assert await asyncio.gather(*(tokens_of(stub, s) for s in SESSIONS)) == [calm] * len(SESSIONS)
            there = [s for s in SESSIONS if await worker_of(cluster, stub, s) is victim]
            assert there, "the placement spreads sessions"
            storm = asyncio.create_task(tokens_of(stub, "storm", 5, lambda: node.send_signal(signal.SIGTERM)))
            out, _ = await asyncio.wait_for(node.communicate(), 60)
            assert node.returncode == 0 and victim.name in out.decode()
            assert await storm == calm
            for session in there:
                assert await worker_of(cluster, stub, session) is not victim
            async with httpx.AsyncClient(timeout=20) as http:
                left = (await http.get(f"{url}/holdfast/workers")).json()
            assert sum(worker["sessions"] for worker in left) >= len(SESSIONS), "with their KV"
            nodes.add_node(num_cpus=1)
            await serving_again(cluster, victim, before)
            assert await tokens_of(stub, "after") == calm
    finally:
        if node.returncode is None:
            node.terminate()
            await node.wait()
        nodes.shutdown()
