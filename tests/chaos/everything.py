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
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import psutil
import ray
from ray.cluster_utils import Cluster as RayCluster

from cluster.chaos.faults import Fault
from cluster.chaos.run import Chaos
from cluster.cli.supervised import keep_supervisors
from cluster.config import Config
from cluster.ray_backend.cluster import Charge
from cluster.ray_backend.connect import NAMESPACE
from cluster.ray_backend.gcs import GcsKeeper
from cluster.ray_backend.nodes import gcs_storage, keep_gcs_state, prepare_environment
from cluster.ray_backend.processes import end_at_once
from cluster.ray_backend.supervisor_actor import SLOTS, start_supervisor, stop_cluster, wait_until_ready
from tests.chaos.faults import faults_of
from tests.chaos.nodes import Node
from tests.hosts import hosts, why_no_namespaces
from tests.redis_server import RedisServer, redis_server
from workers.store.folders import remove_stale

START_DEADLINE_S = 240.0
RENEW_S = 5.0
"""From one renewal of all certificates to the next."""
STORE_GB = 0.05
MARK, LEFT_S = "HOLDFAST_CHAOS", 20.0
"""A variable that every process of a run inherits; until all of them have ended."""
LOGS = ("*/node.log", "*/session_*_*/logs/worker-*.err")
LOG_SHOWN = 2000
"""Characters at the end of each log that are printed when something went wrong."""


@contextmanager
def ray_head(address: str | None, redis: RedisServer | None) -> Iterator[str]:
    """A Ray node for routers and none for ranks, which this process has joined: the cluster's address.

    Its GCS is started again when it dies. ``redis``: keeps the GCS's state; None: a folder does.
    """
    where = {"node_ip_address": address} if address is not None else {}
    told = {"_node_ip_address": address} if address is not None else {}
    with mock.patch.dict(os.environ), gcs_storage() as storage:
        assert storage is not None
        prepare_environment()
        if redis is not None:
            os.environ["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{redis.port}"
        else:
            keep_gcs_state(storage)
        cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False} | where)
        keeper: GcsKeeper | None = None
        try:
            ray.init(address=cluster.address, namespace=NAMESPACE, logging_level="ERROR", log_to_driver=False, **told)
            keeper = GcsKeeper(on_lost=partial(end_at_once, "no fault loses its state"), on_another=end_at_once)
            yield cluster.address
        finally:
            if keeper is not None:
                keeper.stop()
            ray.shutdown()
            cluster.shutdown()
            if keeper is not None:
                with suppress(psutil.NoSuchProcess):
                    keeper.process.kill()
                keeper.process.wait()  # else Python warns when it is collected


async def play(num_faults: int, seed: int) -> dict[str, Any]:
    """Two workers of two ranks, each on a node of its own, two routers, Redis; new certificates all the time.

    With an odd seed the GCS has a Redis of its own. Returns the report; if something went wrong, the ends of the logs
    are printed.
    """
    reason = why_no_namespaces()
    with ExitStack() as stack:
        address, machines = (None, [None, None]) if reason else stack.enter_context(hosts(2))
        # A short path: names of sockets may not be long.
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="holdfast-")))
        stack.enter_context(mock.patch.dict(os.environ, {MARK: str(folder)}))
        durable = ("--appendonly", "yes", "--appendfsync", "always")
        reachable = ("--bind", "127.0.0.1", address, "--protected-mode", "no") if address else ()
        redis = stack.enter_context(redis_server(folder / "redis", *durable, *reachable))
        of_gcs = stack.enter_context(redis_server(folder / "gcs", *durable)) if seed % 2 else None
        ray_address = stack.enter_context(ray_head(address, of_gcs))
        nodes = [Node(machine, folder / str(i)) for i, machine in enumerate(machines)]
        report: dict[str, Any] = {}
        try:
            report = await _play(num_faults, seed, faults_of(redis, of_gcs, nodes), redis, ray_address, nodes)
        finally:
            if not report or report["failures"]:
                _print_logs(folder)
    left = await _left(str(folder))
    remove_stale()  # what stores held that were killed with their nodes
    report["failures"] += [f"still runs: {name}" for name in left]
    return report | {"processes left": len(left)} | ({"no node was cut off": reason} if reason else {})


async def _left(mark: str) -> list[str]:
    """The processes that this run has started and that do not end."""
    deadline = time.monotonic() + LEFT_S
    while True:
        left = list[str]()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == mark:
                    left.append(process.name())
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.2)


def _print_logs(folder: Path) -> None:
    for log in [log for pattern in LOGS for log in folder.glob(pattern)]:
        print(f"{log}:\n{log.read_text(errors='replace')[-LOG_SHOWN:]}")


async def _play(
    num_faults: int, seed: int, faults: list[Fault], redis: RedisServer, ray_address: str, nodes: Sequence[Node]
) -> dict[str, Any]:
    machines = [node.host for node in nodes if node.host is not None]
    # A supervisor may be on any of the nodes.
    host = ray_address.rpartition(":")[0] if machines else "127.0.0.1"
    journal_url = redis.url.replace("127.0.0.1", host)
    given = {"workers": 2, "tp": 2, "routers": 2, "speculative_algorithm": "NGRAM", "hicache_size": STORE_GB}
    config = Config(port=0, grpc_port=0, device="cpu", address=ray_address, **given)
    update = {"journal_url": journal_url, "rank_lease_s": 3.0, "disable_overlap_schedule": False}
    config = config.model_copy(update=update)
    keepers = [asyncio.create_task(node.keep(ray_address)) for node in nodes]
    try:
        charge = replace(Charge.new(config), renew_s=RENEW_S)
        await start_supervisor(charge, SLOTS[0], charge.node)
        urls = (await asyncio.wait_for(wait_until_ready(), START_DEADLINE_S)).urls
        waiting = asyncio.create_task(keep_supervisors(charge, []))
        chaos = Chaos(list(urls), seed, faults)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, chaos.end)
        report = (await chaos.run(num_faults)).as_dict()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return report
    finally:
        try:
            await stop_cluster()
        finally:  # else they would run on: a node's processes do not need the head
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


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
