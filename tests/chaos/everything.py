"""Chaos on all that a cluster is made of: ranks, leaders, routers, whole nodes, and the journal's Redis.

``python -m tests.chaos.everything --faults 200`` for a long run; the test plays a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster as RayCluster

from cluster.chaos import Chaos
from cluster.chaos_faults import Fault
from cluster.config import Config
from cluster.supervisor import NAMESPACE, Cluster
from tests.cluster.served import HOLDFAST
from tests.redis_server import RedisServer

REDIS_DOWN_S = 1.0
RANKS_A_NODE = 2


async def play(folder: Path, num_faults: int, seed: int) -> dict[str, Any]:
    """Two workers of two ranks, each on a node of its own, two routers, Redis. The report."""
    redis = RedisServer(folder / "redis", "--appendonly", "yes", "--appendfsync", "always")
    nodes = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    homes = [await start_node(nodes.address) for _ in range(2)]

    async def kill_redis() -> None:
        redis.kill()
        await asyncio.sleep(REDIS_DOWN_S)
        await asyncio.to_thread(redis.start)

    async def kill_node() -> None:
        await kill_all(homes.pop(0))
        homes.append(await start_node(nodes.address))

    others: list[Fault] = [("kill -9 of Redis", kill_redis), ("kill -9 of a node: raylet and all", kill_node)]
    config = Config(port=0, grpc_port=0, device="cpu", workers=2, tp=2, routers=2, address=nodes.address)
    config = config.model_copy(update={"journal_url": redis.url, "rank_lease_s": 3.0})
    ray.init(address=nodes.address, namespace=NAMESPACE, logging_level="ERROR")
    cluster = Cluster(config)
    try:
        await cluster.start()
        return (await Chaos(cluster.urls, seed, others).run(num_faults)).as_dict()
    finally:
        await cluster.stop()
        ray.shutdown()
        for home in homes:
            await kill_all(home)
        nodes.shutdown()
        redis.kill()


async def start_node(address: str) -> Process:
    command = [*HOLDFAST, "join", address, "--num-cpus", str(RANKS_A_NODE)]
    return await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)


async def kill_all(node: Process) -> None:
    """As when a machine loses power: every process of it, at once."""
    for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
        process.kill()
    await node.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.everything")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="keep the report in this file too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-chaos-") as folder:
        text = json.dumps(asyncio.run(play(Path(folder), given.faults, given.seed)), indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
