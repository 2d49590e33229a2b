"""One rank of a group as a process of its own, for tests that put ranks on different hosts.

Prints ``ready`` when it serves and ``lost: REASON`` when it ends, as a rank does, because of its group.
Rank 0 decodes all the time, so that the ranks are in each other's collectives.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from array import array

from workers.collectives import Shard
from workers.config import EngineConfig
from workers.group import Seat, join_store, open_store, start_rank
from workers.messages import Submission
from workers.scheduling import SamplingParams
from workers.server import WorkerServer

SIZE, TIMEOUT_S = 2, 60.0


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--store-host", required=True)
    parser.add_argument("--store-port", type=int, default=0)
    parser.add_argument("--lease-s", type=float, required=True)
    given = parser.parse_args()
    config = EngineConfig(max_total_tokens=8192, rank_lease_s=given.lease_s, collective_timeout_s=TIMEOUT_S)

    def lost(reason: str) -> None:
        print(f"lost: {reason}", flush=True)
        os._exit(9)

    if given.rank == 0:
        store = open_store(given.store_host, SIZE, TIMEOUT_S)
        print(f"port: {store.port}", flush=True)
    else:
        store = join_store(given.store_host, given.store_port, SIZE, TIMEOUT_S)
    server, _ = await start_rank(Seat("w", 1, Shard(given.rank, SIZE), given.host), config, store, lost)
    print("ready", flush=True)
    turn = 0
    while True:
        if isinstance(server, WorkerServer) and not server._leader.scheduler.turns:
            turn += 1
            params = SamplingParams(max_tokens=2000, ignore_eos=True)
            server._leader.submit(Submission(f"t{turn}", f"s{turn}", "", 1, array("i", [5, 6, 7]), 3, params))
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    asyncio.run(main())
