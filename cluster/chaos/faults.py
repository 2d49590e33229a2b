"""The faults of ``holdfast chaos``: which process, how, and when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import httpx

from holdfast.deadlines import within
from holdfast.errors import HoldfastError

HEAL_DEADLINE_S = 240.0
STOPS_S = (1.0, 4.0, 8.0)
"""How long a process stays stopped: within its lease, past a rank's lease, past a router's."""
STOPPED_SHARE = 0.25
OTHERS_SHARE = 0.5
MOMENT_DEADLINE_S = 5.0
MAX_DRAIN_S = 0.03
"""A fault during a drain is injected within this time of the drain's start."""
MOMENTS = ("any time", "prefill", "decode", "commit", "release", "drain")
"""When a fault is injected: at any time; when a turn was just sent, has some of its tokens, has all but its
last; when a release was just sent; while a worker's sessions migrate."""

Fault: TypeAlias = "tuple[str, Callable[[], Awaitable[None]]]"
"""A name, and what brings it about and ends it."""


class ChaosFailed(HoldfastError):
    """The cluster broke a promise; the report says which."""

    code = "chaos_failed"


class Faults:
    """Injects faults into running processes. ``injected``: time (``time.monotonic``) and kind of each;
    ``moments``: how many faults of ranks and routers were injected at each moment.

    ``others``: more kinds of faults than those of ranks and routers.
    """

    def __init__(
        self, urls: Sequence[str], http: httpx.AsyncClient, rng: random.Random, others: Sequence[Fault] = ()
    ) -> None:
        self._urls, self._http, self._random, self._others = urls, http, rng, others
        self._due: dict[str, asyncio.Event] = {}
        self.injected: list[tuple[float, str]] = []
        self.moments: Counter[str] = Counter()

    def reach(self, moment: str) -> None:
        """Called by clients at a moment, for which a fault may be waiting."""
        event = self._due.pop(moment, None)
        if event is not None:
            event.set()

    async def inject(self) -> None:
        """Inject one fault, when all workers serve. One worker is spared, so that turns can fail over to it."""
        await self.wait_for_workers()
        if self._others and self._random.random() < OTHERS_SHARE:
            name, act = self._random.choice(self._others)
            self.injected.append((time.monotonic(), name))
            await act()
            return
        kind, pid = self._random.choice(await self._victims())
        moment = self._random.choice(MOMENTS)
        how = "SIGSTOP" if self._random.random() < STOPPED_SHARE else "kill -9"
        await self._wait_for(moment)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP if how == "SIGSTOP" else signal.SIGKILL)
            self.injected.append((time.monotonic(), f"{how} of a {kind}"))
            self.moments[moment] += 1
        if how == "SIGSTOP":
            await asyncio.sleep(self._random.choice(STOPS_S))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def wait_for_workers(self) -> None:
        """Returns when at least two workers serve, and none is draining."""
        deadline = time.monotonic() + HEAL_DEADLINE_S
        while len(workers := await self.workers()) < 2 or any(worker["draining"] for worker in workers):
            if time.monotonic() > deadline:
                raise ChaosFailed(f"the workers did not come back within {HEAL_DEADLINE_S} s")
            for worker in workers:
                if worker["draining"]:  # its drain ended with the router that ran it
                    await self._drain(worker["worker_id"])
            await asyncio.sleep(0.1)

    async def wait_for_routers(self) -> None:
        deadline = time.monotonic() + HEAL_DEADLINE_S
        for url in self._urls:
            while await self._router_pid(url) is None:
                if time.monotonic() > deadline:
                    raise ChaosFailed(f"the router at {url} did not come back within {HEAL_DEADLINE_S} s")
                await asyncio.sleep(0.1)

    async def workers(self) -> list[dict[str, Any]]:
        """The workers, from any router that answers."""
        for url in self._urls:
            with contextlib.suppress(httpx.HTTPError):
                workers: list[dict[str, Any]] = (await self._http.get(f"{url}/holdfast/workers")).json()
                return workers
        return []

    # ---- inside -------------------------------------------------------------------------------------

    async def _victims(self) -> list[tuple[str, int]]:
        ranks = [rank for worker in await self.workers() for rank in worker["ranks"]]
        victims = [("rank" if rank["rank"] else "leader", int(rank["pid"])) for rank in ranks]
        routers = [pid for url in self._urls if (pid := await self._router_pid(url)) is not None]
        # The only router is no victim: its clients could not go on anywhere.
        return victims + [("router", pid) for pid in routers if len(routers) > 1]

    async def _router_pid(self, url: str) -> int | None:
        with contextlib.suppress(httpx.HTTPError):
            return int((await self._http.get(f"{url}/holdfast/router")).json()["pid"])
        return None

    async def _wait_for(self, moment: str) -> None:
        if moment == "drain":
            worker = self._random.choice(await self.workers() or [{"worker_id": ""}])
            self._draining = asyncio.create_task(self._drain(worker["worker_id"]))
            await asyncio.sleep(self._random.uniform(0.0, MAX_DRAIN_S))
        elif moment != "any time":
            event = self._due[moment] = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await within(MOMENT_DEADLINE_S, event.wait())

    async def _drain(self, worker_id: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            url = self._random.choice(self._urls)
            await self._http.post(f"{url}/holdfast/workers/{worker_id}/drain?timeout_s=0&stop=true", timeout=60)
