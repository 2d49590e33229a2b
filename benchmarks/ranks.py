"""The cost of a group of ranks beyond computation: a step's parts, and the control plane's latency.

Each rank is a process of its own, without Ray, with one thread; the leader is measured from inside, by
timers around its parts. The floor of the step log is one message there and back on a gRPC stream
between the same processes' kind.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from benchmarks.common import save
from cluster.bench.report import percentile
from holdfast.deadlines import within
from holdfast.v1 import rank_pb2, worker_pb2, worker_pb2_grpc
from workers.config import EngineConfig
from workers.engine.messages import Submission
from workers.models.parallel import Shard
from workers.scheduling import SamplingParams
from workers.serving.group import RankIdentity, join_store, open_store, start_rank
from workers.serving.worker_server import WorkerServer

HOST = "127.0.0.1"
CONFIG = EngineConfig(
    max_total_tokens=65_536, max_running_requests=64, max_sessions=2048, rank_lease_s=10.0, collective_timeout_s=60.0
)
STEPS, WARM_UP, ROUNDS = 150, 10, 5
PROMPT = 64
CONTROLS = 200


class Timers:
    """Seconds of each step in each named part. ``step`` includes the others, and ends a step."""

    def __init__(self) -> None:
        self.steps: list[defaultdict[str, float]] = [defaultdict(float)]

    def p50_us(self) -> dict[str, float]:
        """The median over steps, so that a step that the machine interrupted does not count."""
        whole = [step for step in self.steps if "step" in step]
        return {part: round(1e6 * percentile([step[part] for step in whole], 50), 1) for part in whole[-1]}

    def around(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*arguments, **keywords)
            finally:
                self.steps[-1][name] += time.perf_counter() - began
                if name == "step":
                    self.steps.append(defaultdict(float))

        setattr(owner, method, timed)


class Acks:
    """Seconds from sending an entry to its last ack, and from the end of the leader's step to that ack."""

    def __init__(self, server: WorkerServer) -> None:
        self.round_trip_s: list[float] = []
        self.waited_s: list[float] = []
        self._sent: dict[int, float] = {}
        self._computed: dict[int, float] = {}
        leader, log = server._leader, server._leader.log
        write, ack, emit_updates = leader._replication.write, log.ack, leader._emit_updates

        def writing(batch: Any) -> None:
            self._sent[log.last_index + 1] = time.perf_counter()
            write(batch)

        def acking(rank: int, message: rank_pb2.Ack) -> None:
            ack(rank, message)
            if min(log.acked.values()) == message.index:
                now = time.perf_counter()
                if message.index not in self._sent:
                    return  # sent before the measurement began
                self.round_trip_s.append(now - self._sent.pop(message.index))
                computed = self._computed.pop(message.index, None)
                self.waited_s.append(now - computed if computed is not None else 0.0)

        def sending(log_index: int | None = None) -> None:
            if min(log.acked.values(), default=0) < log.last_index:
                self._computed[log.last_index] = time.perf_counter()
            emit_updates(log_index)

        # Methods are replaced on these instances alone.
        for owner, name, method in (
            (leader._replication, "write", writing),
            (log, "ack", acking),
            (leader, "_emit_updates", sending),
        ):
            setattr(owner, name, method)


@asynccontextmanager
async def group(size: int) -> AsyncIterator[tuple[WorkerServer, str]]:
    """A leader in this process, and a process for each follower."""

    def fail(reason: str) -> None:
        raise SystemExit(reason)

    store = open_store(HOST, size, 60.0) if size > 1 else None
    command = [sys.executable, "-m", "benchmarks.ranks", "--size", str(size)]
    if store is not None:
        command += ["--store-port", str(store.port)]
    others = [await asyncio.create_subprocess_exec(*command, "--rank", str(rank)) for rank in range(1, size)]
    server, address = await start_rank(RankIdentity("bench", 1, Shard(0, size), HOST), CONFIG, store, fail)
    assert isinstance(server, WorkerServer)
    try:
        yield server, address
    finally:
        server.expect_end()
        await server.stop()
        for other in others:
            await within(30, other.wait())


async def follow(rank: int, size: int, port: int) -> None:
    """Run a follower until its leader ends."""
    left = asyncio.Event()
    loop = asyncio.get_running_loop()
    store = join_store(HOST, port, size, 60.0)
    identity = RankIdentity("bench", 1, Shard(rank, size), HOST)

    def on_lost(reason: str) -> None:
        loop.call_soon_threadsafe(left.set)

    server, _ = await start_rank(identity, CONFIG, store, on_lost)
    await left.wait()
    await server.stop()


def submit(server: WorkerServer, name: str, max_tokens: int) -> None:
    tokens = array("i", (5 + (hash(name) % 1000 + i * 17) % 2000 for i in range(PROMPT)))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    server._leader.submit(Submission(name, name, "", 1, tokens, PROMPT, params))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def measure_steps(size: int, batch: int) -> dict[str, Any]:
    async with group(size) as (server, _):
        leader, timers = server._leader, Timers()
        acks = Acks(server) if size > 1 else None
        timers.around(leader, "step", "step")
        timers.around(leader.scheduler, "plan", "plan")
        timers.around(leader._replication, "write", "log")
        timers.around(leader.cache, "digest", "digest")
        timers.around(server._links, "send", "send")
        timers.around(leader.rank, "launch", "compute")
        timers.around(leader.rank, "choose", "compute")
        if server._group is not None:
            timers.around(server._group, "all_reduce", "collectives")
            timers.around(server._group, "gather", "collectives")
        timers.around(leader.scheduler, "commit", "collect")
        timers.around(leader, "collect", "collect")
        leader._replication.send = server._links.send
        for i in range(batch):
            submit(server, f"s{i}", STEPS + WARM_UP + batch)
        await until(lambda: leader.counters["finished_length"] == batch)
        # Not those in which the batch fills, and each shape runs for the first time.
        del timers.steps[: WARM_UP + batch]
        spent = timers.p50_us()
    figures: dict[str, Any] = {"us of a step, p50": spent}
    if acks is not None:
        figures["digest, % of a step"] = round(100 * spent["digest"] / spent["step"], 2)
        figures["us from sending to the last ack"] = spread(acks.round_trip_s)
        figures["us that tokens wait for acks after the step"] = spread(acks.waited_s)
    return figures


def spread(seconds: list[float]) -> dict[str, float]:
    return {
        "p50": round(1e6 * percentile(seconds, 50), 1),
        "p99": round(1e6 * percentile(seconds, 99), 1),
        "mean": round(1e6 * statistics.mean(seconds), 1),
    }


async def measure_control(size: int, load: int) -> dict[str, Any]:
    """Release and FreeTail over gRPC, one after another, with ``load`` running turns."""
    figures = {}
    async with group(size) as (server, address), grpc.aio.insecure_channel(address) as channel:
        leader, stub = server._leader, worker_pb2_grpc.WorkerServiceStub(channel)
        for i in range(CONTROLS):
            submit(server, f"idle{i}", 2)
        await until(lambda: leader.counters["finished_length"] == CONTROLS)
        for i in range(load):
            submit(server, f"busy{i}", 3000)
        await until(lambda: len(leader.scheduler.running) == load)

        def free_tail(i: int) -> Any:
            return stub.FreeTail(worker_pb2.WorkerFreeTailRequest(session_id=f"idle{i}", epoch=1, keep_len=20))

        def release(i: int) -> Any:
            return stub.Release(worker_pb2.WorkerReleaseRequest(session_id=f"idle{i}", epoch=1))

        for name, call in (("FreeTail", free_tail), ("Release", release)):
            times = []
            for i in range(CONTROLS):
                began = time.perf_counter()
                answer = await call(i)
                times.append(time.perf_counter() - began)
                assert len(answer.ranks) == size
            figures[name] = spread(times)
        for turn_id in list(leader.scheduler.turns):
            leader.abort(turn_id)
        await until(lambda: not leader.scheduler.turns)
    return figures


async def grpc_floor() -> dict[str, float]:
    """The round trip of a small message on a bidirectional stream to another process: the step log's floor."""
    command = [sys.executable, "-c", "import asyncio, benchmarks.ranks as r; asyncio.run(r.echo())"]
    other = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert other.stdout is not None
    address = (await other.stdout.readline()).decode().strip()
    times = []
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/bench/Echo")()
        for _ in range(1000):
            began = time.perf_counter()
            await call.write(b"x" * 200)
            await call.read()
            times.append(time.perf_counter() - began)
        call.cancel()
    other.terminate()
    await other.wait()
    return spread(times)


async def echo() -> None:
    async def repeat(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message

    server = grpc.aio.server()
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(repeat)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    print(f"{HOST}:{port}", flush=True)
    await server.wait_for_termination()


async def measure_overhead(batch: int, figures: dict[str, Any]) -> dict[str, Any]:
    """How much longer plan, log and collect take with two ranks than with one, in round trips of the same minute."""
    ratios = []
    for _ in range(ROUNDS):
        floor_us = (await grpc_floor())["p50"]
        alone, both = [await measure_steps(size, batch) for size in (1, 2)]
        figures[f"step, 1 ranks, batch {batch}"], figures[f"step, 2 ranks, batch {batch}"] = alone, both
        spent, base = both["us of a step, p50"], alone["us of a step, p50"]
        ratios.append(round(sum(spent[part] - base[part] for part in ("plan", "log", "collect")) / floor_us, 2))
    return {"gRPC stream round trips": statistics.median(ratios), "each of": ratios}


async def measure() -> dict[str, Any]:
    figures: dict[str, Any] = {"what": "bundled model, fp32 on CPU, one thread a rank, decode at 64 to 300 tokens"}
    figures["us of a gRPC stream round trip (floor)"] = await grpc_floor()
    for batch in (1, 64):
        figures[f"control overhead of 2 ranks, batch {batch}"] = await measure_overhead(batch, figures)
    for size in (1, 2, 4):
        for load in (0, 8):
            name = f"us of a control call, {size} ranks, {'idle' if not load else f'{load} turns running'}"
            figures[name] = await measure_control(size, load)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--store-port", type=int)
    given = parser.parse_args()
    if given.rank:
        asyncio.run(follow(given.rank, given.size, given.store_port))
    else:
        save("ranks", asyncio.run(measure()))


if __name__ == "__main__":
    main()
