"""One seed: a cluster, its clients and its faults, and the laws at the end."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.simulation.clients import Client
from tests.simulation.cluster import Cluster, simulated_edges
from tests.simulation.components import Worker
from tests.simulation.engine import STEPS_S, SimulatedLeader
from tests.simulation.faults import Faults
from tests.simulation.loop import SimulatedLoop, Stuck
from tests.simulation.model import GROUPS, SimulatedRank
from workers.kv import SessionCache
from workers.serving.page_copies import NUM_BUFFERS

SETTLE_S = 30.0
SWEPT_WITHIN_S = 90.0
QUIET_WITHIN_S = 3.0
ALGORITHMS = ("NONE", "NGRAM", "STANDALONE", "EAGLE3")
gc.freeze()  # what is there now stays: only what seeds leave behind is looked through after each


@dataclass
class Result:
    """What a seed gave. ``trace``: what happened, with the time of each."""

    seed: int
    violations: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    num_turns: int = 0
    num_tokens: int = 0
    num_migrated: int = 0
    """Sessions that migrated with their KV."""
    num_callbacks: int = 0
    simulated_s: float = 0.0


class _Log(logging.Handler):
    """What the code says goes to the trace; an error that it did not foresee is a violation."""

    def __init__(self, result: Result, trace: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._result, self._trace = result, trace

    def emit(self, record: logging.LogRecord) -> None:
        self._trace(f"  {record.getMessage()}")
        if record.exc_info and record.levelno >= logging.ERROR:
            self._result.violations.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


def run_seed(seed: int) -> Result:
    """Play a seed. What it does depends on nothing else."""
    result, rng = Result(seed), random.Random(seed)
    random.seed(seed)
    loop = SimulatedLoop()
    loop.set_exception_handler(lambda loop, context: result.trace.append(f"  {context}"))

    def trace(what: str) -> None:
        result.trace.append(f"{loop.time():9.4f} {what}")

    logger, handler = logging.getLogger("holdfast"), _Log(result, trace)
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    level = logger.level
    logger.setLevel(logging.INFO)
    asyncio.set_event_loop(loop)
    gc.disable()
    try:
        with tempfile.TemporaryDirectory(prefix="holdfast-simulation-") as disks:
            _run(loop, rng, result, trace, Path(disks))
    finally:
        result.num_callbacks, result.simulated_s = loop.num_callbacks, loop.time()
        logger.removeHandler(handler)
        logger.propagate = propagates
        logger.setLevel(level)
        asyncio.set_event_loop(None)
        _bury(loop)
        gc.enable()
    return result


def _run(loop: SimulatedLoop, rng: random.Random, result: Result, trace: Callable[[str], None], disks: Path) -> None:
    has_disks = result.seed % 4 == 1
    num_supervisors = 2 if result.seed % 4 >= 2 else 1
    cluster = Cluster(loop, rng, rng.choice((1, 2, 2, 3)), trace, disks if has_disks else None, num_supervisors)
    SimulatedLeader.step_s = rng.choice(STEPS_S)
    SimulatedRank.kinds = list(GROUPS)[result.seed % len(GROUPS)]
    overlaps = result.seed // len(GROUPS) % 2 == 1
    algorithm = ALGORITHMS[result.seed // (2 * len(GROUPS)) % len(ALGORITHMS)]
    kv_store = Path("store") if result.seed % 2 else None
    cluster.engine_config = replace(
        cluster.engine_config,
        overlap_schedule=overlaps,
        speculative_algorithm=algorithm,
        kv_store=kv_store,
        zero_freed_pages=result.seed % 3 == 0,
    )
    cluster.keys_change = result.seed % 3 == 2
    with simulated_edges(lambda: cluster.network, random.Random(result.seed)):
        try:
            loop.run_until_complete(_play(cluster, rng, result))
        except Stuck as stuck:
            cluster.violated(f"L13: {stuck}")
    result.violations += cluster.violations
    cluster.disk.db.close()
    cluster.stores.close()


def _bury(loop: SimulatedLoop) -> None:
    """Collect killed processes now; what their clean-up tries has no effect."""
    loop.is_over = True
    loop.on_callback = lambda count: None
    loop._ready.clear()  # type: ignore[attr-defined]
    loop._scheduled.clear()  # type: ignore[attr-defined]
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    loop.set_exception_handler(lambda loop, context: None)
    logging.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()
    sys.unraisablehook = hook
    logging.disable(logging.NOTSET)
    loop.close()


async def _play(cluster: Cluster, rng: random.Random, result: Result) -> None:
    await cluster.start()
    await _whole(cluster)
    clients = [Client(cluster, f"s{i}", random.Random(rng.getrandbits(60))) for i in range(rng.randrange(2, 7))]
    faults = Faults(cluster, random.Random(rng.getrandbits(60)), rng.randrange(0, 13))
    striking = asyncio.get_running_loop().create_task(faults.run())
    keeping = asyncio.get_running_loop().create_task(cluster.keep_supervisors())
    runs: list[asyncio.Task[None]] = [client.process.spawn(client.run(rng.randrange(3, 14))) for client in clients]
    await _all(cluster, runs)
    striking.cancel()
    faults.heal()
    await _whole(cluster)
    last = [client.process.spawn(client.turn()) for client in clients if not client.released]
    await _all(cluster, last)
    await _check(cluster, clients)
    keeping.cancel()
    result.num_turns = sum(client.num_turns for client in clients)
    result.num_migrated = cluster.sessions_migrated
    result.num_tokens = sum(client.num_tokens for client in clients)


async def _all(cluster: Cluster, tasks: list[asyncio.Task[None]]) -> None:
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if error is not None:
            cluster.violated(f"a client got an unexpected error: {error!r}")


async def _whole(cluster: Cluster) -> None:
    """Everything that died is back, and every router reaches every worker.

    Not only as routers know: a connection that a cut held up may end a group of ranks after the cut.
    """
    end = cluster.loop.time() + SETTLE_S

    def whole() -> bool:
        ranks = [rank for worker in cluster.workers for rank in worker.ranks]
        return all(rank.alive for rank in ranks) and all(
            router.core is not None and router.process.alive and len(router.core.fleet.alive()) == 2
            for router in cluster.routers
        )

    while not whole():
        if cluster.loop.time() > end:
            cluster.violated(f"L13: the cluster is not whole {SETTLE_S} s after the last fault")
            return
        await asyncio.sleep(0.1)


async def _swept(cluster: Cluster, gone: set[str]) -> None:
    """Nothing is left of released sessions, and of loads: at once, or, where that cannot be, some sweeps later.

    A turn may arrive at a worker after its session's release, on a connection that was held up; so may copies at a
    store, and a disk may have failed, or its store died, before it was told of a release. Sessions may still be
    migrating, from workers of the generation before.
    """
    patient = cluster.held_up or cluster.stores.have_disks
    await _none_within(SWEPT_WITHIN_S if patient else 0.0, lambda: _still_held(cluster, gone), cluster)
    await _none_within(SWEPT_WITHIN_S, lambda: _loading(cluster), cluster)


async def _none_within(seconds: float, faults: Callable[[], list[str]], cluster: Cluster) -> None:
    end = cluster.loop.time() + seconds
    while left := faults():
        if cluster.loop.time() >= end:
            for what in left:
                cluster.violated(f"L12: {what}")
            return
        await asyncio.sleep(1.0)


def _still_held(cluster: Cluster, gone: set[str]) -> list[str]:
    copied = gone & cluster.stores.owners()
    held = [f"the KV stores still have copies of {copied}"] if copied else []
    for worker in cluster.workers:
        for rank, cache in enumerate(_caches(worker)):
            if left := gone & set(cache.slots):
                held.append(f"rank {rank} of {worker.name} still holds {left}")
    return held


def _loading(cluster: Cluster) -> list[str]:
    return [
        f"loads of rank {rank} of {worker.name} still hold buffers, or have lost them"
        for worker in cluster.workers
        for rank, server in enumerate((worker.leader, *worker.followers) if worker.leader is not None else ())
        if server._copies is not None and server._copies._buffers.qsize() < NUM_BUFFERS
    ]


def _caches(worker: Worker) -> list[SessionCache]:
    """Of each rank; none while the worker starts."""
    if worker.leader is None:
        return []
    return [worker.leader._leader.cache, *(follower.follower.rank.cache for follower in worker.followers)]


async def _check(cluster: Cluster, clients: list[Client]) -> None:
    """Laws L1 to L13, where nothing runs any more."""
    await asyncio.sleep(2.0)
    await _whole(cluster)
    for client in clients:
        held = cluster.disk.db.execute(
            "SELECT ids FROM tokens WHERE session_id = ? ORDER BY start", (client.name,)
        ).fetchall()
        journaled = [int.from_bytes(ids[i : i + 4], "little") for (ids,) in held for i in range(0, len(ids), 4)]
        if journaled != ([] if client.released else client.history):
            cluster.violated(f"L10: the journal has {journaled} of {client.name}, its client {client.history}")
    for router in cluster.routers:
        if router.core is not None and router.core.live.ids():
            cluster.violated(f"L13: {router.process.name} still runs {router.core.live.ids()}")
    gone = {client.name for client in clients if client.released}
    await _swept(cluster, gone)
    for worker in cluster.workers:
        if worker.leader is None:
            continue
        if turns := worker.leader._leader.scheduler.turns:
            cluster.violated(f"L7: {worker.name} still runs {list(turns)}")
        caches = _caches(worker)
        for rank, cache in enumerate(caches):
            report = cache.audit()
            if not report.ok:
                cluster.violated(f"L1: rank {rank} of {worker.name}: {report}")
        # A session that has just migrated away is being freed, on one rank after another.
        end = cluster.loop.time() + QUIET_WITHIN_S
        while any(_state(cache) != _state(caches[0]) for cache in caches[1:]) and cluster.loop.time() < end:
            await asyncio.sleep(0.1)
        if any(_state(cache) != _state(caches[0]) for cache in caches[1:]):
            cluster.violated(f"L8: the ranks of {worker.name} differ")


def _state(cache: SessionCache) -> Any:
    """What a digest stands for: every reference count, every slot's page tables and lengths."""
    slots = {
        slot.session_id: (
            (slot.row, slot.running, slot.committed_len, slot.allocated_len, slot.reserved_len, slot.base_len),
            (slot.turn_starts, [table.pages for table in slot.tables]),
        )
        for slot in cache.slots.values()
    }
    return [group.pool.refcounts for group in cache.groups], slots
