"""What copying pages to the node's KV store costs the steps meanwhile: tokens/s with copies over without, in turns.

The engine alone with the bundled model; the store is a process of its own, and so small that its memory is used again.
The floor is no store: 1.0.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.common import save
from workers.config import EngineConfig
from workers.engine.leader import Leader
from workers.engine.messages import Submission, TurnUpdate
from workers.kv.slot import new_tokens
from workers.scheduling import SamplingParams
from workers.serving.page_copies import PageCopies

CONFIG = EngineConfig(max_total_tokens=65_536, max_running_requests=32, num_threads=2, overlap_schedule=False)
ROUNDS, BATCHES, PROMPT, OUTPUT = 9, (1, 16), 256, 256
STORE = """
import asyncio, sys
from pathlib import Path
from workers.store.server import KVStore

async def main():
    await KVStore(Path(sys.argv[1]), 70_000_000).start()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Worker:
    """An engine in its thread, with copies or without."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop, self._left, self._done = asyncio.get_running_loop(), 0, asyncio.Event()
        self.leader = Leader(config, self._take, lambda error: None)
        self.leader.start()
        self.copies = PageCopies(self.leader, config) if config.kv_store is not None else None

    def _take(self, updates: list[TurnUpdate]) -> None:
        self._loop.call_soon_threadsafe(self._count, sum(update.finish is not None for update in updates))

    def _count(self, num_finished: int) -> None:
        self._left -= num_finished
        if not self._left:
            self._done.set()

    async def run(self, number: int, batch: int) -> float:
        """Seconds for a batch of turns."""
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        self._left = batch
        self._done.clear()
        began = time.perf_counter()
        for i in range(batch):
            tokens = new_tokens([10 + (number * 7919 + i * 131 + j * 17) % 2000 for j in range(PROMPT)])
            name = f"{number}-{batch}-{i}"
            self.leader.submit(Submission(name, name, "", 1, tokens, PROMPT, params))
        await self._done.wait()
        seconds = time.perf_counter() - began
        while self.copies is not None and self.copies.num_waiting:
            await asyncio.sleep(0.01)
        return seconds

    async def stop(self) -> None:
        if self.copies is not None:
            await self.copies.stop()
        await asyncio.to_thread(self.leader.stop)


async def measure(folder: Path) -> dict[str, object]:
    off, on = Worker(CONFIG), Worker(replace(CONFIG, kv_store=folder))
    ratios: dict[str, float] = {}
    for batch in BATCHES:
        found = []
        for number in range(ROUNDS):
            without = await off.run(number, batch)
            found.append(without / await on.run(number, batch))
        ratios[str(batch)] = round(statistics.median(found[1:]), 3)
    assert on.copies is not None
    num_copied = on.copies.counters["kv_pages_copied"]
    for worker in (off, on):
        await worker.stop()
    what = f"tokens/s with copies over without, by turns at once; {PROMPT} tokens in, {OUTPUT} out"
    return {"what": what, "ratio, median": ratios, "pages copied": num_copied}


def main() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        folder = Path(scratch) / "store"
        store = subprocess.Popen([sys.executable, "-c", STORE, str(folder)], stdout=subprocess.PIPE)
        try:
            assert store.stdout is not None and store.stdout.readline()
            save("kv_copies", asyncio.run(measure(folder)))
        finally:
            store.kill()
            store.wait()


if __name__ == "__main__":
    main()
