"""One rank of a group as a separate process, for tests with ranks on different hosts.

Prints ``ready: ADDRESS`` when it serves and ``lost: REASON`` when it ends, as a rank does, because of its group.
Rank 0 decodes all the time, so that the ranks are in each other's collectives.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import subprocess
import sys
import threading
import time
from array import array

from tests.hosts import Host
from workers.config import EngineConfig
from workers.engine.messages import Submission
from workers.models.parallel import Shard
from workers.scheduling import SamplingParams
from workers.serving.group import RankIdentity, join_store, open_store, start_rank
from workers.serving.worker_server import WorkerServer

TIMEOUT_S = 60.0


class RankProcess:
    """One such process, seen from its test: what it prints, and its end."""

    def __init__(
        self, host: Host, *, rank: int = 0, size: int = 1, store: tuple[str, int] = ("", 0), lease_s: float
    ) -> None:
        command = [sys.executable, "-m", "tests.workers.rank_process", "--host", host.address]
        command += ["--rank", str(rank), "--size", str(size), "--lease-s", str(lease_s)]
        command += ["--store-host", store[0], "--store-port", str(store[1])]
        self.process = subprocess.Popen(host.command(*command), stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, beginning: str, timeout_s: float) -> str:
        """The rest of the first line that begins so. Raises queue.Empty."""
        deadline = time.monotonic() + timeout_s
        while True:
            line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            if line.startswith(beginning):
                return line.removeprefix(beginning).strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self._lines.put(line.strip())


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--lease-s", type=float, required=True)
    parser.add_argument("--store-host", required=True)
    parser.add_argument("--store-port", type=int, required=True)
    given = parser.parse_args()
    config = EngineConfig(
        max_total_tokens=8192,
        rank_lease_s=given.lease_s,
        collective_timeout_s=TIMEOUT_S,
        overlap_schedule=True,
    )

    def lost(reason: str) -> None:
        print(f"lost: {reason}", flush=True)
        os._exit(9)

    store = None
    if given.rank > 0:
        store = join_store(given.store_host, given.store_port, given.size, TIMEOUT_S)
    elif given.size > 1:
        store = open_store(given.host, given.size, TIMEOUT_S)
        print(f"port: {store.port}", flush=True)
    seat = RankIdentity("w", 1, Shard(given.rank, given.size), given.host)
    server, address = await start_rank(seat, config, store, lost)
    print(f"ready: {address}", flush=True)
    turn = 0
    while True:
        if isinstance(server, WorkerServer) and not server._leader.scheduler.turns:
            turn += 1
            params = SamplingParams(max_tokens=2000, ignore_eos=True)
            server._leader.submit(Submission(f"t{turn}", f"s{turn}", "", 1, array("i", [5, 6, 7]), 3, params))
        await asyncio.sleep(0.02)


if __name__ == "__main__":
    asyncio.run(main())
