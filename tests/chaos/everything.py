"""Chaos on all of a cluster: ranks, leaders, routers, supervisors, whole nodes, their network, Ray's GCS, the
journal's Redis.

Each node is a host of its own, where this machine makes network namespaces; else none is cut off.

``python -m tests.chaos.everything --faults 200`` for a long run; the test plays a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from asyncio.subprocess import STDOUT, Process
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import psutil
import ray
from ray.cluster_utils import Cluster as RayCluster

from cluster.chaos.faults import Fault
from cluster.chaos.run import Chaos
from cluster.config import Config
from cluster.ray_backend.cluster import Charge
from cluster.ray_backend.connect import NAMESPACE
from cluster.ray_backend.gcs import GcsKeeper
from cluster.ray_backend.nodes import gcs_storage, keep_gcs_state
from cluster.ray_backend.processes import answer_of, runs
from cluster.ray_backend.supervisor_actor import SLOTS, find_leader, start_supervisor, stop_cluster, wait_until_ready
from tests.cluster.served import HOLDFAST
from tests.hosts import Host, hosts, why_no_namespaces
from tests.redis_server import RedisServer, redis_server

REDIS_DOWN_S = 1.0
CUTS_S = (1.0, 4.0)
"""Shorter and longer than the leases."""
SUPERVISOR_STOPS_S = (2.0, 8.0)
"""Shorter and longer than its lease."""
GCS_STOPS_S = (2.0, 8.0)
START_DEADLINE_S, LEADER_POLL_S = 120.0, 0.2
RANKS_A_NODE = 2
RENEW_S = 5.0
"""From one renewal of all certificates to the next."""
STORE_GB = 0.05
LOGS = ("*/node.log", "*/session_*_*/logs/worker-*.err")
LOG_SHOWN = 2000
"""Characters at the end of each log that are printed when something went wrong."""


class Node:
    """A Ray node that a worker of ours runs on. ``folder``: Ray's files of it, and its log."""

    def __init__(self, host: Host | None, folder: Path) -> None:
        self.host = host
        # Nodes that share a folder may choose the same names for their sockets: only one of them starts then.
        self._options = ["--num-cpus", str(RANKS_A_NODE), "--temp-dir", str(folder)]
        self._log = folder / "node.log"
        self._process: Process | None = None
        folder.mkdir()

    async def keep(self, address: str) -> None:
        """Run it, and again whenever it ends, as a service manager would."""
        command = [*HOLDFAST, "join", address, *self._options]
        if self.host is not None:
            command = self.host.command(*command, "--node-ip-address", self.host.address)
        try:
            with self._log.open("ab") as log:
                while True:
                    self._process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=STDOUT)
                    await self._process.wait()
        finally:
            self.kill()

    def kill(self) -> None:
        """As when a machine loses power: every process of it, at once."""
        with suppress(psutil.NoSuchProcess):
            if self._process is not None:
                me = psutil.Process(self._process.pid)
                for process in [*me.children(recursive=True), me]:
                    process.kill()


@contextmanager
def ray_head(address: str | None) -> Iterator[str]:
    """A Ray node for routers and none for ranks, which this process has joined: the cluster's address.

    Its GCS is started again when it dies.
    """
    where = {"node_ip_address": address} if address is not None else {}
    told = {"_node_ip_address": address} if address is not None else {}
    with mock.patch.dict(os.environ), gcs_storage() as storage:
        assert storage is not None
        keep_gcs_state(storage)
        cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False} | where)
        try:
            ray.init(address=cluster.address, namespace=NAMESPACE, logging_level="ERROR", log_to_driver=False, **told)
            keeper = GcsKeeper()
            yield cluster.address
            keeper.stop()
        finally:
            ray.shutdown()
            cluster.shutdown()
            for gcs in _gcs():  # not the one that this cluster has started
                gcs.kill()


def _gcs() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name() == "gcs_server" and runs(child)]


async def play(num_faults: int, seed: int) -> dict[str, Any]:
    """Two workers of two ranks, each on a node of its own, two routers, Redis; new certificates all the time.

    Returns the report; if something went wrong, the ends of the logs are printed.
    """
    reason = why_no_namespaces()
    with ExitStack() as stack:
        address, machines = (None, [None, None]) if reason else stack.enter_context(hosts(2))
        # A short path: names of sockets may not be long.
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="holdfast-")))
        durable = ("--appendonly", "yes", "--appendfsync", "always")
        reachable = ("--bind", "127.0.0.1", address, "--protected-mode", "no") if address else ()
        redis = stack.enter_context(redis_server(folder / "redis", *durable, *reachable))
        ray_address = stack.enter_context(ray_head(address))
        nodes = [Node(machine, folder / str(i)) for i, machine in enumerate(machines)]
        report: dict[str, Any] = {}
        try:
            report = await _play(num_faults, seed, redis, ray_address, nodes)
        finally:
            if not report or report["failures"]:
                _print_logs(folder)
    return report | ({"no node was cut off": reason} if reason else {})


def _print_logs(folder: Path) -> None:
    for log in [log for pattern in LOGS for log in folder.glob(pattern)]:
        print(f"{log}:\n{log.read_text(errors='replace')[-LOG_SHOWN:]}")


async def _play(
    num_faults: int, seed: int, redis: RedisServer, ray_address: str, nodes: Sequence[Node]
) -> dict[str, Any]:
    in_turn = cycle(nodes)

    async def kill_redis() -> None:
        redis.kill()
        await asyncio.sleep(REDIS_DOWN_S)
        await asyncio.to_thread(redis.start)

    async def kill_node() -> None:
        next(in_turn).kill()

    async def cut_off(host: Iterator[Host], seconds: float) -> None:
        cut = next(host)
        cut.cut()
        await asyncio.sleep(seconds)
        cut.heal()

    others: list[Fault] = [("kill -9 of Redis", kill_redis), ("kill -9 of a node: raylet and all", kill_node)]
    others += [("kill -9 of the GCS", partial(_fail_gcs, 0.0))]
    others += [(f"SIGSTOP of the GCS, {s} s", partial(_fail_gcs, s)) for s in GCS_STOPS_S]
    others += [("kill -9 of the supervisor that leads", partial(_fail_supervisor, 0.0))]
    others += [
        (f"SIGSTOP of the supervisor that leads, {s} s", partial(_fail_supervisor, s)) for s in SUPERVISOR_STOPS_S
    ]
    hosts_in_turn = cycle([node.host for node in nodes if node.host is not None])
    if nodes[0].host is not None:
        others += [(f"a node is cut off for {s} s", partial(cut_off, hosts_in_turn, s)) for s in CUTS_S]
    # A supervisor may be on any of the nodes.
    host = ray_address.rpartition(":")[0] if nodes[0].host is not None else "127.0.0.1"
    journal_url = redis.url.replace("127.0.0.1", host)
    given = {"workers": 2, "tp": 2, "routers": 2, "speculative_algorithm": "NGRAM", "hicache_size": STORE_GB}
    config = Config(port=0, grpc_port=0, device="cpu", address=ray_address, **given)
    config = config.model_copy(update={"journal_url": journal_url, "rank_lease_s": 3.0})
    keepers = [asyncio.create_task(node.keep(ray_address)) for node in nodes]
    try:
        charge = replace(Charge.new(config), renew_s=RENEW_S)
        await start_supervisor(charge, SLOTS[0], charge.node)
        chaos = Chaos(list((await asyncio.wait_for(wait_until_ready(), START_DEADLINE_S)).urls), seed, others)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, chaos.end)
        return (await chaos.run(num_faults)).as_dict()
    finally:
        try:
            await stop_cluster()
        finally:  # else they would run on: a node's processes do not need the head
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


async def _fail_supervisor(stops_s: float) -> None:
    """Kill the one that leads, or stop it. Within the lease it leads on; later it finds another that leads."""
    while True:
        found = await find_leader()
        process = await answer_of(found[0].process.remote()) if found is not None else None
        if process is not None:
            break
        await asyncio.sleep(LEADER_POLL_S)
    pid = process.pid
    with suppress(ProcessLookupError):
        if not stops_s:
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(stops_s)
        os.kill(pid, signal.SIGCONT)


async def _fail_gcs(stops_s: float) -> None:
    """Kill it, or stop it; returns when one answers."""
    (gcs,) = _gcs()
    if stops_s:
        gcs.suspend()
        await asyncio.sleep(stops_s)
        gcs.resume()
    else:
        gcs.kill()
    await asyncio.to_thread(ray.nodes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.everything")
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="keep the report in this file too")
    given = parser.parse_args()
    report = asyncio.run(play(given.faults, given.seed))
    text = json.dumps(report, indent=2)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")
    if report["failures"] or report["pages leaked"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
