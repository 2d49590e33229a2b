"""The cost of turn N: pinned session, full history resent over the prefix cache, and no cache.

4 sessions x 300 turns, 16 tokens in and 8 out, the sessions taking turns one after another: a turn that
joins a batch waits for the step under way, which is not its own cost. Without a cache only the reported
turns of one session are run: each computes its whole history and none depends on another.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import grpc
import httpx

from benchmarks.common import long_context_model, save, serving
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from workers.config import EngineConfig
from workers.engine.leader import Leader
from workers.engine.messages import Submission, TurnUpdate
from workers.kernels.cpu.ops import AttendOp
from workers.kernels.cpu.tape import StepArrays, Tape
from workers.scheduling import SamplingParams

SESSIONS, TURNS, TOKENS_IN, TOKENS_OUT = 4, 300, 16, 8
EARLY, LATE = range(1, 11), range(TURNS - 10, TURNS)
"""Turns 2-11 and the last 10, counted from 0."""


def input_of(session: int, turn: int) -> list[int]:
    return [10 + (session * 7919 + turn * 31 + i * 17) % 2000 for i in range(TOKENS_IN)]


class Run:
    """The turns of one mode: seconds of each, and seconds between its output tokens."""

    def __init__(self, stub: session_pb2_grpc.SessionServiceStub) -> None:
        self._stub = stub
        self.turn_s: dict[int, list[float]] = {}
        self.step_s: dict[int, list[float]] = {}
        self.cached: dict[int, list[int]] = {}

    async def turn(self, turn: int, session_id: str, tokens: list[int]) -> list[int]:
        sampling = pb.Sampling(max_tokens=TOKENS_OUT, ignore_eos=True)
        request = pb.GenerateRequest(session_id=session_id, tokens=pb.TokenIds(ids=tokens), sampling=sampling)
        output: list[int] = []
        began = last = time.perf_counter()
        async for answer in self._stub.Generate(request):
            now = time.perf_counter()
            if output:
                self.step_s.setdefault(turn, []).append(now - last)
            last = now
            output += answer.tokens
        self.turn_s.setdefault(turn, []).append(last - began)
        self.cached.setdefault(turn, []).append(answer.cached_tokens)
        return output

    def mean_ms(self, turns: range) -> float:
        return 1000 * statistics.mean(t for turn in turns for t in self.turn_s[turn])

    def step_ms(self, turns: range) -> float:
        return 1000 * statistics.mean(t for turn in turns for t in self.step_s[turn])


def engine_alone(model: Path) -> dict[str, dict[str, float]]:
    """The same turns with the engine alone, in this process: milliseconds of a turn, and of its attention.

    In attention are all of the turn's steps: that of its input, 17 queries, and its 7 decodes. Each operation is a
    call of its own here, to be measured.
    """
    attention_s = 0.0
    ended = threading.Event()

    def timed(tape: Tape, step: StepArrays) -> None:
        nonlocal attention_s
        began = time.perf_counter()
        for kind in tape.run_each(step):
            ended_at = time.perf_counter()
            attention_s += ended_at - began if kind is AttendOp else 0.0
            began = ended_at

    def emit(updates: list[TurnUpdate]) -> None:
        if any(update.finish for update in updates):
            ended.set()

    def fail(error: BaseException) -> None:
        raise error

    leader = Leader(EngineConfig(model=model, max_total_tokens=160_000, num_threads=2), emit, fail)
    params = SamplingParams(max_tokens=TOKENS_OUT, ignore_eos=True)
    turn_ms: dict[int, list[float]] = {}
    attention_ms: dict[int, list[float]] = {}
    with mock.patch.object(Tape, "run", timed):
        leader.start()
        for turn in range(TURNS):
            for number in range(SESSIONS):
                slot = leader.cache.slots.get(f"s{number}")
                tokens = (slot.tokens if slot else array("i")) + array("i", input_of(number, turn))
                ended.clear()
                began, attention_s = time.perf_counter(), 0.0
                leader.submit(Submission(f"{number}-{turn}", f"s{number}", "", 1, tokens, len(tokens), params))
                assert ended.wait(60), "a turn does not end"
                turn_ms.setdefault(turn, []).append(1000 * (time.perf_counter() - began))
                attention_ms.setdefault(turn, []).append(1000 * attention_s)
        leader.stop()

    def mean(values: dict[int, list[float]], turns: range) -> float:
        return round(statistics.mean(v for turn in turns for v in values[turn]), 2)

    return {
        "turns 2-11": {"turn": mean(turn_ms, EARLY), "attention": mean(attention_ms, EARLY)},
        "last 10": {"turn": mean(turn_ms, LATE), "attention": mean(attention_ms, LATE)},
    }


async def play(
    run: Run,
    turns: Iterable[int],
    sessions: int,
    request: Callable[[int, int], tuple[str, list[int]]],
    keep: Callable[[int, int, list[int]], None],
) -> None:
    for turn in turns:
        for number in range(sessions):
            session_id, tokens = request(number, turn)
            keep(number, turn, await run.turn(turn, session_id, tokens))


async def measure() -> dict[str, object]:
    with long_context_model(16_384) as model:
        async with serving(workers=1, model=model, max_total_tokens=160_000, threads_per_worker=2) as cluster:
            channel = grpc.aio.insecure_channel(cluster.grpc_url.removeprefix("grpc://"))
            stub = session_pb2_grpc.SessionServiceStub(channel)
            histories: list[list[list[int]]] = [[[]] for _ in range(SESSIONS)]

            def remember(number: int, turn: int, output: list[int]) -> None:
                histories[number].append(histories[number][turn] + input_of(number, turn) + output)

            pinned, resent, uncached = Run(stub), Run(stub), Run(stub)
            await play(pinned, range(TURNS), SESSIONS, lambda n, t: (f"s{n}", input_of(n, t)), remember)
            for number in range(SESSIONS):
                await stub.Release(pb.ReleaseRequest(session_id=f"s{number}"))

            def whole(number: int, turn: int) -> tuple[str, list[int]]:
                return "", histories[number][turn] + input_of(number, turn)

            def same(number: int, turn: int, output: list[int]) -> None:
                expected = histories[number][turn + 1][-TOKENS_OUT:]
                assert output == expected, f"session {number} turn {turn}: other tokens than pinned"

            async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
                await http.post("/flush_cache")
                await play(resent, range(TURNS), SESSIONS, whole, same)

                def whole_uncached(number: int, turn: int) -> tuple[str, list[int]]:
                    # A first token that was not used before, so that no prefix can be cached.
                    session_id, tokens = whole(number, turn)
                    return session_id, [2010 + number, turn, *tokens[2:]]

                for turn in [*EARLY, *LATE]:
                    await http.post("/flush_cache")
                    await play(uncached, [turn], 1, whole_uncached, lambda n, t, o: None)
            await channel.close()
        # After the cluster has ended, because it shares the cores.
        alone = engine_alone(model)
    modes = {"pinned session": pinned, "full history resent": resent, "no cache": uncached}
    # A turn is one step for its input and TOKENS_OUT - 1 decodes; all of them attend to the history.
    decode_growth_ms = TOKENS_OUT * (pinned.step_ms(LATE) - pinned.step_ms(EARLY))
    late, early = pinned.mean_ms(LATE), pinned.mean_ms(EARLY)
    first, last = alone["turns 2-11"], alone["last 10"]
    remainder = last["turn"] - last["attention"] + first["attention"]
    return {
        "what": f"{SESSIONS} sessions x {TURNS} turns, {TOKENS_IN} in, {TOKENS_OUT} out, page size 16",
        "ms of a turn": {
            name: {
                "turns 2-11": round(run.mean_ms(EARLY), 2),
                "last 10": round(run.mean_ms(LATE), 2),
                "last 10 over turns 2-11": round(run.mean_ms(LATE) / run.mean_ms(EARLY), 2),
                "tokens computed in the last turn": round(
                    TURNS * (TOKENS_IN + TOKENS_OUT) - TOKENS_OUT - statistics.mean(run.cached[TURNS - 1])
                ),
            }
            for name, run in modes.items()
        },
        "ms of a decode step": {
            "turns 2-11": round(pinned.step_ms(EARLY), 2),
            "last 10": round(pinned.step_ms(LATE), 2),
        },
        "pinned growth less that of as many decodes": round((late - decode_growth_ms) / early, 2),
        "engine alone, ms": alone,
        "engine alone, growth less attention's": round(remainder / first["turn"], 2),
        "full history resent over pinned, last 10": round(resent.mean_ms(LATE) / late, 2),
        "no cache over pinned, last 10": round(uncached.mean_ms(LATE) / late, 2),
    }


def main() -> None:
    save("turns", asyncio.run(measure()))


if __name__ == "__main__":
    main()
