"""The leader, the follower and the rank links without their threads."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

from holdfast.v1 import rank_pb2
from tests.simulation.model import guess
from workers.engine.follower import Follower
from workers.engine.leader import IDLE_WAIT_S, Leader
from workers.scheduling import Draft, Speculation, Turn
from workers.serving.rank_links import RankLinks

STEPS_S = ((0.005, 0.02), (0.1, 0.4))


class InThisThread(Executor):
    """Does what it is given at once."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **keywords))
        return done


class Guesses(Speculation):
    """Beside lookups, which find nothing in such outputs but what was predicted: right up to a random token."""

    def __init__(self, leader: Leader, max_draft: int) -> None:
        super().__init__(max_draft)
        self._running = leader.scheduler.running

    def candidates(self, num_rows: int) -> list[Turn]:
        return list(dict.fromkeys([*super().candidates(num_rows), *self._running.values()]))

    def propose(self, turn: Turn, limit: int, num_rows: int) -> Draft | None:
        looked_up = super().propose(turn, limit, num_rows)
        draft = guess(turn, random.choice([0, 2, 2, 3, 4, 6]))[:limit]
        return looked_up or (Draft(draft) if draft else None)

    def pays(self, num_rows: int) -> bool:
        guess_pays = random.random() < 0.5
        return super().pays(num_rows) or guess_pays

    def certainty_pays(self, num_rows: int) -> bool:
        return random.random() < 0.5


class SimulatedLeader(Leader):
    """The leader's loop as a task: one step, then the time that it took."""

    step_s = STEPS_S[0]
    _grammar_executor = InThisThread()

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._commands = _Commands()  # type: ignore[assignment]

        if isinstance(self.drafts.speculation, Speculation):
            self.drafts.speculation = Guesses(self, self.drafts.speculation.max_draft)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        commands: Any = self._commands
        try:
            while True:
                if not self.scheduler.turns and self._in_flight is None:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(commands.some.wait(), IDLE_WAIT_S)
                while commands.waiting:
                    commands.waiting.popleft()()
                commands.some.clear()
                self.step()
                await asyncio.sleep(random.uniform(*self.step_s))
        except Exception as error:
            self._on_crash(error)


class _Commands:
    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
        self.some = asyncio.Event()

    def put(self, command: Callable[[], None]) -> None:
        self.waiting.append(command)
        self.some.set()


class SimulatedLinks(RankLinks):
    """Without the thread that forwards entries."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._thread = SimpleNamespace(start=lambda: None)  # type: ignore[assignment]

    def send(self, entry: Any) -> None:
        self._enqueue(rank_pb2.LeaderMessage(entry=entry))


class SimulatedFollower(Follower):
    """The follower's loop as a task."""

    play_s = (0.0001, 0.01)

    def start(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._drive())

    def push(self, item: Any) -> None:
        self._queue.put_nowait(item)

    async def _drive(self) -> None:
        try:
            while True:
                item = await self._queue.get()
                await asyncio.sleep(random.uniform(*self.play_s))
                self.process(item)
        except Exception as error:
            self._on_crash(error)
