"""Routers and workers as simulated processes: what Ray and its nodes are to a real cluster.

``supervised`` has a supervisor's view of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from holdfast.errors import HoldfastError
from holdfast.silence import silent_for
from holdfast.v1 import session_pb2_grpc, worker_pb2
from router.access.keys import Keyring
from router.core import RouterCore
from router.faces.grpc_service import SessionServer
from router.fleet.link import WorkerAddress
from router.metrics import Metrics
from tests.simulation.loop import Process
from tests.simulation.world import World
from workers.engine.messages import Submission
from workers.models.parallel import Shard
from workers.serving.rank_server import RankServer
from workers.serving.worker_server import WorkerServer

T = TypeVar("T")
POLL_S = 0.05
START_POLL_S = 0.01
NOTICED_S = (0.0, 1.0)
"""From a process's death until Ray reports it."""
STARTS_S = (0.3, 2.0)
ROUTER_PORTS = (1001, 1002)
KEYS_CHANGE_S = 3.0
SCOPES = (("", 0), ("", 550_000), ("group:a", 550_000), ("", 700_000), ("group:b", 0))
"""Whose prefixes turns share, and their shares of each pool in millionths, one after another."""


class NameTaken(HoldfastError):
    """Ray lets no two actors of a name live."""


async def died_or_silent(world: World, processes: list[Process], probed: Process, silence_s: float) -> str:
    """Returns when Ray reports the death of one of them, or the probed one has been silent for ``silence_s``."""

    def heard() -> float | None:
        return world.loop.time() if world.reaches(probed) and not probed.paused else None

    silence = asyncio.create_task(silent_for(silence_s, heard))
    try:
        while all(process.alive for process in processes):
            if silence.done():
                return f"{probed.name} does not answer"
            await asyncio.sleep(POLL_S)
    finally:
        silence.cancel()
    await asyncio.sleep(world.rng.uniform(*NOTICED_S))
    return "it died"


class _Codec:
    """Tokens are their own text."""

    chat_template = ""

    def stream(self, sampling: Any) -> Any:
        return SimpleNamespace(push=lambda tokens, ended_by=None: "", finish=lambda matched: "", stopped_by=None)

    def resolve_stops(self, sampling: Any) -> None:
        pass

    def stop_token(self, output: Any, sampling: Any) -> None:
        return None

    def decode(self, tokens: Any) -> str:
        return ""


class _Keys(Keyring):
    """One tenant's keys, which name other scopes from time to time. Each share has room for the longest turn."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def scope_of(self, tenant: str) -> worker_pb2.KVScope:
        number = int(self._world.loop.time() / KEYS_CHANGE_S) if self._world.keys_change else 0
        name, share_ppm = SCOPES[number % len(SCOPES)]
        return worker_pb2.KVScope(name=name, share_ppm=share_ppm)


class Router:
    """A router: its port, and the process that serves it now."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.name, self.host = f"router{index}", f"router{index}"
        self.address = f"{self.host}:{ROUTER_PORTS[index]}"
        self.incarnation = 0
        self.process: Process
        self.core: RouterCore | None = None

    async def start(self, workers: list[WorkerAddress], epoch: int) -> None:
        if self.incarnation and self.process.alive:
            raise NameTaken(f"{self.process.name} serves")
        self.incarnation += 1
        self.core = None
        world, rng = self.world, self.world.rng
        skew_s = rng.uniform(-2.0, 2.0) if rng.random() < 0.3 else 0.0
        world.disturbed |= skew_s != 0.0
        self.process = process = Process(f"router{self.index}#{self.incarnation}", self.host, skew_s)

        async def serve() -> RouterCore:
            journal = world.journal(process.name)
            await journal.start()
            core = RouterCore(world.router_config, journal, _Codec(), Metrics(), _Keys(world))  # type: ignore[arg-type]
            core.start()
            server = world.network.server()
            session_pb2_grpc.add_SessionServiceServicer_to_server(SessionServer(core), server)
            await core.fleet.set_workers(workers, epoch)
            server.add_insecure_port(self.address)
            # Not when its supervisor hears of it, which may have died meanwhile.
            self.core = core
            world.trace(f"{process.name} serves")
            return core

        await self.ask(process, serve())

    async def ask(self, process: Process, coroutine: Coroutine[Any, Any, T]) -> T:
        """Have a process of the router do something; its death is an error."""
        asked = process.spawn(coroutine)
        while process.alive and not asked.done():
            await asyncio.sleep(START_POLL_S)
        if not asked.done():
            raise HoldfastError(f"{process.name} died")
        return asked.result()

    def serving(self, process: Process | None) -> RouterCore:
        """What a process serves, if it still does."""
        if self.core is None or process is not self.process or not process.alive:
            raise HoldfastError(f"{self.name} does not serve")
        return self.core


class Worker:
    """A worker, and the processes of its ranks. ``before``: of the cluster's generation before, if there was one."""

    def __init__(self, world: World, index: int, size: int, before: Worker | None = None) -> None:
        self.world, self.index = world, index
        self.name, self.size = f"w{index}", size
        # Another machine's name: its processes have the ports of one that serves beside them.
        self.host = f"{before.host}'" if before is not None else f"worker{index}"
        self.incarnation = before.incarnation if before is not None else 0
        self.ranks: list[Process] = []
        self.leader: WorkerServer | None = None
        self.followers: list[RankServer] = []
        self.address: WorkerAddress | None = None

    def is_taken(self) -> bool:
        """Whether the names of its processes are."""
        return any(rank.alive for rank in self.ranks)

    def has_kv(self, session_id: str) -> bool:
        """Whether a session's slot has KV that can migrate."""
        slot = self.leader._leader.cache.slots.get(session_id) if self.leader is not None else None
        return slot is not None and slot.committed_len > 0

    async def start(self) -> None:
        world, engine, node = self.world, self.world.engine_config, self.name.replace("w", "node")
        if engine.kv_store is not None:
            engine = replace(engine, kv_store=Path(node))
        await asyncio.sleep(world.rng.uniform(*STARTS_S))
        if self.is_taken():
            raise NameTaken(f"{self.ranks[0].name} serves")
        if any(rank.alive for rank in self.ranks):
            world.violated(f"L16: {self.name} is started twice")
        self.incarnation += 1
        self.address, self.leader, self.followers = None, None, []
        name = f"{self.name}@{self.incarnation}"
        # Each rank has its own host: a worker may span machines.
        self.ranks = [Process(f"{name}/{rank}", f"{self.host}.{rank}") for rank in range(self.size)]
        if not all(world.reaches(rank) for rank in self.ranks):
            self.ranks = []
            raise HoldfastError(f"a node of {self.name} is not there")
        followers: dict[int, str] = {}
        broadcasts: list[list[int]] = []
        identity = (self.name, self.incarnation, engine)

        async def follow(rank: int, group: Any, on_lost: Callable[[str], None]) -> None:
            server = RankServer(*identity, group, node, on_lost)
            followers[rank] = await server.start(self.ranks[rank].host)
            self.followers.append(server)

        async def lead(rank: int, group: Any, on_lost: Callable[[str], None]) -> None:
            server = WorkerServer(*identity, on_lost, node=node, group=group)
            address = await server.start(self.ranks[rank].host, lambda: followers)
            submit = server._leader.submit

            def checked_submit(submission: Submission) -> None:
                if not submission.ephemeral:
                    world.submitted(name, submission.session_id, submission.epoch)
                submit(submission)

            server._leader.submit = checked_submit  # type: ignore[method-assign]
            self.leader = server
            self.address = WorkerAddress(self.name, self.incarnation, address, engine.max_running_requests)

        for rank, process in reversed(list(enumerate(self.ranks))):

            def on_lost(reason: str, process: Process = process) -> None:
                world.trace(f"{process.name} ends: {reason}")
                world.kill(process)

            group: Any = SimpleNamespace(shard=Shard(rank, self.size), broadcasts=broadcasts)
            started = process.spawn((follow if rank else lead)(rank, group, on_lost))
            while not started.done() and all(rank.alive for rank in self.ranks):
                await asyncio.sleep(START_POLL_S)
            if not started.done() or not all(rank.alive for rank in self.ranks):
                self.address = None
                raise HoldfastError(f"a rank of {name} died")
            started.result()
        world.trace(f"{name} serves")
