"""Pauses when a session's node dies, by the length of its history: with copies on another node, and without.

Three Ray nodes on this machine: one for the routers, and two with a worker each. A node dies when all of its processes
are killed, so that its connections are closed at once; one that is cut off is lost after its lease.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster as RayCluster

from benchmarks.common import long_context_model, save
from benchmarks.kv_tiers import HISTORIES, STORE_GB, history, sessions_of

REPLICATED_S = 3.0
"""As long as a user takes at least: filled pages leave for the other node meanwhile."""


async def pauses(model: Path, store_gb: float, rounds: int) -> dict[str, float]:
    """The median pause in ms by history."""
    nodes = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    workers_nodes = [nodes.add_node(num_cpus=1) for _ in range(2)]

    def kill_node(worker: dict[str, Any]) -> None:
        shown = worker["ranks"][0]["node"].rpartition("/")[2]
        node = next(node for node in workers_nodes if node.node_id.startswith(shown))
        workers_nodes.remove(node)
        for process in psutil.Process(node.all_processes["raylet"][0].process.pid).children(recursive=True):
            process.kill()
        # Ray's own, and what it remembers. It returns when the node is gone.
        threading.Thread(target=nodes.remove_node, args=(node, False)).start()

    found: dict[str, float] = {}
    try:
        async with sessions_of(model=model, address=nodes.address, hicache_size=store_gb) as sessions:
            for length in HISTORIES:
                waits = []
                for number in range(rounds):
                    name = f"s{length}-{number}"
                    await sessions.turn(name, history(number, length))
                    await asyncio.sleep(REPLICATED_S)
                    waits.append(await sessions.turn(name, [5, 6, 7], kill_node))
                    workers_nodes.append(nodes.add_node(num_cpus=1))  # in the main thread, which Ray needs
                    await sessions.whole()
                found[str(length)] = round(1000 * statistics.median(waits), 1)
    finally:
        nodes.shutdown()
    return found


async def measure(rounds: int) -> dict[str, object]:
    with long_context_model(40_960) as model:
        on, off = await pauses(model, STORE_GB, rounds), await pauses(model, 0.0, rounds)
    return {
        "what": f"the pause when a node dies mid-stream, ms by tokens of history, median of {rounds}",
        "with copies on another node": on,
        "without": off,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    save("kv_nodes", asyncio.run(measure(parser.parse_args().rounds)))


if __name__ == "__main__":
    main()
