"""Chaos on all that a cluster is made of: ranks, leaders, routers, whole nodes, their network, the journal's Redis.

Each node is a host of its own, where this machine makes network namespaces; else none is cut off.

``python -m tests.chaos.everything --faults 200`` for a long run; the test plays a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster as RayCluster

from cluster.chaos import Chaos
from cluster.chaos_faults import Fault
from cluster.config import Config
from cluster.ray_cluster import NAMESPACE, Cluster
from tests.cluster.served import HOLDFAST
from tests.hosts import Host, hosts, why_no_namespaces
from tests.redis_server import RedisServer

REDIS_DOWN_S = 1.0
CUTS_S = (1.0, 4.0)
"""Shorter and longer than the leases."""
RANKS_A_NODE = 2


@dataclass
class Node:
    """A Ray node that a worker of ours runs on."""

    host: Host | None
    process: Process

    @classmethod
    async def start(cls, address: str, host: Host | None) -> Node:
        command = [*HOLDFAST, "join", address, "--num-cpus", str(RANKS_A_NODE)]
        if host is not None:
            command = host.command(*command, "--node-ip-address", host.address)
        return cls(host, await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL))

    async def kill(self) -> None:
        """As when a machine loses power: every process of it, at once."""
        with suppress(psutil.NoSuchProcess):
            me = psutil.Process(self.process.pid)
            for process in [*me.children(recursive=True), me]:
                process.kill()
        await self.process.wait()


async def play(folder: Path, num_faults: int, seed: int) -> dict[str, Any]:
    """Two workers of two ranks, each on a node of its own, two routers, Redis. The report."""
    reason = why_no_namespaces()
    with nullcontext((None, [None, None])) if reason else hosts(2) as (address, machines):
        report = await _play(folder, num_faults, seed, address, machines)
    return report | ({"no node was cut off": reason} if reason else {})


async def _play(
    folder: Path, num_faults: int, seed: int, address: str | None, machines: Sequence[Host | None]
) -> dict[str, Any]:
    redis = RedisServer(folder / "redis", "--appendonly", "yes", "--appendfsync", "always")
    here = {"node_ip_address": address} if address is not None else {}
    nodes = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False} | here)
    homes = [await Node.start(nodes.address, machine) for machine in machines]

    async def kill_redis() -> None:
        redis.kill()
        await asyncio.sleep(REDIS_DOWN_S)
        await asyncio.to_thread(redis.start)

    async def kill_node() -> None:
        await homes[0].kill()  # ``keep_nodes`` starts another
        homes.append(homes.pop(0))

    async def keep_nodes() -> None:
        """As a service manager would; a node may also fail to start, where many do at once."""
        while True:
            for home in [home for home in homes if home.process.returncode is not None]:
                fresh = await Node.start(nodes.address, home.host)
                homes[homes.index(home)] = fresh
            await asyncio.sleep(0.5)

    async def cut_off(seconds: float) -> None:
        host = homes[0].host
        assert host is not None
        homes.append(homes.pop(0))
        host.cut()
        await asyncio.sleep(seconds)
        host.heal()

    others: list[Fault] = [("kill -9 of Redis", kill_redis), ("kill -9 of a node: raylet and all", kill_node)]
    if address is not None:
        others += [(f"a node is cut off for {s} s", partial(cut_off, s)) for s in CUTS_S]
    config = Config(port=0, grpc_port=0, device="cpu", workers=2, tp=2, routers=2, address=nodes.address)
    config = config.model_copy(update={"journal_url": redis.url, "rank_lease_s": 3.0})
    told = {"_node_ip_address": address} if address is not None else {}
    ray.init(address=nodes.address, namespace=NAMESPACE, logging_level="ERROR", **told)
    cluster = Cluster(config)
    keeper = asyncio.create_task(keep_nodes())
    try:
        await cluster.start()
        chaos = Chaos(cluster.urls, seed, others)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, chaos.end)
        return (await chaos.run(num_faults)).as_dict()
    finally:
        keeper.cancel()
        await cluster.stop()
        ray.shutdown()
        for home in homes:
            await home.kill()
        nodes.shutdown()
        redis.kill()


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
