"""Loads of KV beside the steps of other turns: how many they wait for, and what they may write to meanwhile."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.v1 import session_pb2 as pb
from tests.harness import Harness, running
from tests.parity.matrix import CONFIG, checkpoint
from tests.store.nodes import Stub, copied, counters, lose_device_kv, node, turn, words
from tests.waiting import until
from workers.engine.messages import Submission
from workers.scheduling import SamplingParams
from workers.serving import page_copies

HISTORY = words(1, 300)


class Steps:
    """A leader that computes its steps when it is told to."""

    def __init__(self, cluster: Harness) -> None:
        self.leader = cluster.workers["w0"]._leader
        self.rows: list[int] = []
        """Of each step that began while they were held."""
        self._launch, self._allowed, self._held = self.leader.rank.launch, threading.Semaphore(0), False
        self.leader.rank.launch = self._wait  # type: ignore[method-assign]

    def _wait(self, batch: Any, num_copies: int) -> None:
        if self._held:
            self.rows.append(len(batch.rows))
            self._allowed.acquire()
        self._launch(batch, num_copies)

    async def hold(self) -> None:
        """Returns when the leader has begun a step and waits in it."""
        self._held = True
        await until(lambda: self.rows, 10, "a step to begin")

    async def next(self) -> int:
        """Let the step end. Returns how many rows the next one has, when it has begun."""
        count = len(self.rows)
        self._allowed.release()
        await until(lambda: len(self.rows) > count, 10, "the next step")
        return self.rows[-1]

    def free(self) -> None:
        self._held = False
        self._allowed.release()


@asynccontextmanager
async def busy_worker(tmp_path: Path) -> AsyncIterator[tuple[Harness, Stub, Steps]]:
    """It has a turn under way, whose steps are held, and the copies of ``HISTORY`` beside it in its node's store."""
    engine = replace(CONFIG, model=checkpoint("full"), kv_store=tmp_path / "store", overlap_schedule=False)
    async with (
        node(tmp_path / "store"),
        running(tmp_path / "c", num_workers=1, engine=engine) as cluster,
        cluster.channel() as channel,
    ):
        stub = Stub(channel)
        await turn(stub, "first", HISTORY)
        await copied(cluster, "w0")
        await lose_device_kv(cluster)
        steps = Steps(cluster)
        sampling = pb.Sampling(max_tokens=150, ignore_eos=True)
        busy = stub.Generate(pb.GenerateRequest(session_id="busy", tokens=pb.TokenIds(ids=[5, 6]), sampling=sampling))
        await busy.read()
        await steps.hold()
        try:
            yield cluster, stub, steps
        finally:
            steps.free()
            busy.cancel()
        await cluster.assert_no_leak()


async def test_a_load_waits_for_two_steps(tmp_path: Path) -> None:
    async with busy_worker(tmp_path) as (cluster, stub, steps):
        worker = cluster.workers["w0"]
        loads: Any = worker._loads
        coming = asyncio.create_task(turn(stub, "other", [*HISTORY, 3, 4]))
        await until(lambda: any(look.found.done() for look in loads._looks.values()), 10, "the copies to be found")
        complete, completing = steps.leader.migrations.complete_load, threading.Event()

        def completed(*given: Any) -> Any:
            done = complete(*given)
            completing.set()
            return done

        steps.leader.migrations.complete_load = completed  # type: ignore[method-assign]
        assert await steps.next() == 1
        await until(completing.is_set, 10, "the load's pages to be there")
        assert await steps.next() == 2, "the load was committed, and its turn admitted"
        steps.free()
        said, cached = await coming
        assert cached == 300 and len(said) == 12
        assert counters(cluster, "w0")["kv_tokens_loaded"] == 300


async def test_a_load_writes_no_page_that_it_has_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its look at the copies and its writing, its session begins another turn in its place."""
    looked, go_on, look = threading.Event(), threading.Event(), page_copies._look

    def slowly(*given: Any) -> Any:
        found = look(*given)
        looked.set()
        assert go_on.wait(30)
        return found

    plain = replace(CONFIG, model=checkpoint("full"))
    async with running(tmp_path / "alone", num_workers=1, engine=plain) as cluster, cluster.channel() as channel:
        expected = [token async for token in long_turn(Stub(channel))]
    async with busy_worker(tmp_path) as (cluster, stub, steps):
        monkeypatch.setattr(page_copies, "_look", slowly)
        coming = asyncio.create_task(turn(stub, "other", [*HISTORY, 3, 4]))
        steps.free()
        await until(looked.is_set, 10, "the load to begin")
        coming.cancel()
        said = []
        async for token in long_turn(stub):
            said.append(token)
            go_on.set()
        assert said == expected
        await until(lambda: counters(cluster, "w0")["kv_loads_failed"], 10, "the load to be refused")
        assert not counters(cluster, "w0")["kv_tokens_loaded"]


async def test_a_turn_that_comes_twice_is_looked_for_twice(tmp_path: Path) -> None:
    """From two routers, of which one has lost its lease. The leader's thread comes to both after its step."""
    async with busy_worker(tmp_path) as (cluster, _, steps):
        loads: Any = cluster.workers["w0"]._loads
        params = SamplingParams(max_tokens=150)
        for epoch, length in (1, 200), (2, 300):
            tokens = array("i", [*HISTORY[:length], 3, 4])
            loads.submit(Submission("turn", "twice", "", epoch, tokens, 202, params))
        assert len(loads._looks) == 2, "what is there of the second's tokens is more than the first has"
        await until(lambda: all(look.found.done() for look in loads._looks.values()), 10, "the copies to be found")
        steps.free()
        await until(lambda: steps.leader.counters["turns"] == 3 and not loads._tasks, 10, "the later one to run")
        await asyncio.wrap_future(steps.leader.release_session("twice", 3))
        assert not loads._looks


async def long_turn(stub: Any) -> AsyncIterator[int]:
    """The tokens of a turn of ``other`` whose history is longer than HISTORY, and nowhere copied."""
    sampling = pb.Sampling(temperature=0.8, top_k=40, seed=5, max_tokens=150, ignore_eos=True)
    tokens = pb.TokenIds(ids=words(9, 320))
    async for answer in stub.Generate(pb.GenerateRequest(session_id="other", tokens=tokens, sampling=sampling)):
        for token in answer.tokens:
            yield token


async def test_pages_are_not_freed_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, go_on, write = threading.Event(), threading.Event(), page_copies.write_pages

    def slowly(*given: Any) -> None:
        writing.set()
        assert go_on.wait(30)
        write(*given)

    async with busy_worker(tmp_path) as (_, stub, steps):
        monkeypatch.setattr(page_copies, "write_pages", slowly)
        coming = asyncio.create_task(turn(stub, "other", [*HISTORY, 3, 4]))
        steps.free()
        await until(writing.is_set, 10, "the load to begin")
        ending = steps.leader.call(lambda: steps.leader.migrations.abort_import("other"))
        await asyncio.sleep(0.3)
        assert "other" in steps.leader.migrations._imports and not ending.done()
        go_on.set()
        await asyncio.wrap_future(ending)
        coming.cancel()
