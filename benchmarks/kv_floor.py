"""What a failover's pause cannot be shorter than: the engine alone, with nothing else on the machine.

Before the last of the sessions that were lost together has its next token, their KV is checked and copied, by both
cores, and the tokens that no copy has are computed: of each session all after its last full page.
"""

from __future__ import annotations

import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from benchmarks.cpu import best
from workers.config import EngineConfig
from workers.engine.leader import Leader
from workers.engine.messages import Submission, TurnUpdate
from workers.scheduling import SamplingParams

COPY_BYTES = 4 * 1024 * 1024
ROUNDS = 5


def prompt(number: int, length: int) -> list[int]:
    """A history that none of 1,899 other numbers has."""
    return [10 + (number * 7919 + i * 17) % 1900 for i in range(length)]


def floor_ms(model: Path, count: int, length: int) -> float:
    """Of ``count`` sessions that each have ``length`` tokens of KV, and the most that a page lacks."""
    updates: list[TurnUpdate] = []

    def fail(error: BaseException) -> None:
        raise error

    config = EngineConfig(
        model=model, max_total_tokens=count * (length + 256), max_running_requests=count, num_threads=2
    )
    leader = Leader(config, updates.extend, fail)
    page = leader.cache.page_size
    tokens = {number: prompt(number, length) for number in range(count)}

    def turns(name: str) -> float:
        updates.clear()
        for number, history in tokens.items():
            given = Submission(
                f"{name}-{number}", f"s{number}", "", 1, array("i", history), len(history), SamplingParams(max_tokens=1)
            )
            leader._submit(given)
        began = time.perf_counter()
        while sum(update.finish is not None for update in updates) < count:
            leader.step()
        return time.perf_counter() - began

    turns("histories")
    computing = []
    for i in range(ROUNDS):
        for history in tokens.values():
            history += history[: page - 1]
        computing.append(turns(f"rest {i}"))
    return 1000 * (min(computing) + _copying_s(sum(leader.rank.kv.page_bytes) * count * length // page))


def _copying_s(num_bytes: int) -> float:
    """Seconds to check so many bytes and copy them elsewhere, on two cores."""
    copies, device = bytearray(num_bytes), bytearray(num_bytes)
    chunks = [slice(at, at + COPY_BYTES) for at in range(0, num_bytes, COPY_BYTES)]
    source, target = memoryview(copies), memoryview(device)

    def copy(chunk: slice) -> None:
        crc32(source[chunk])
        target[chunk] = source[chunk]

    with ThreadPoolExecutor(2) as threads:
        return best(lambda: list(threads.map(copy, chunks)))
