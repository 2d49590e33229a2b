"""The nodes' KV stores, one for each worker's ranks: the real servers and clients, with memory in place of a file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.v1 import store_pb2, store_pb2_grpc
from tests.simulation.loop import Process
from tests.simulation.world import World
from workers.store.client import StoreClient
from workers.store.copies import Copy
from workers.store.peer_server import PeerServer
from workers.store.server import KVStore

NUM_NODES = 2
NUM_BYTES, SLAB_BYTES = 16 * 1024, 2048
"""Little: copies give way to others."""
WRITE_BYTES_PER_S = 20_000
"""Copies wait a while until they are on the other node."""
CHECK_S = 0.5
START_POLL_S = 0.01
ARENAS: dict[str, bytearray] = {}


def node_name(index: int) -> str:
    return f"node{index}"


def store_address(folder: Path) -> str:
    """Where the ranks of a node reach its store. ``folder``: named like the node."""
    return f"{folder}:77"


class SimulatedStore(KVStore):
    """Serves on the simulated network."""

    def __init__(self, name: str) -> None:
        super().__init__(Path(name), NUM_BYTES, SLAB_BYTES, write_bytes_per_s=WRITE_BYTES_PER_S)
        self._arena = Path(name)
        ARENAS[name] = bytearray(NUM_BYTES)
        self._open(memoryview(ARENAS[name]))


class SimulatedClient(StoreClient):
    """Maps such an arena."""

    def _map(self, arena: store_pb2.Arena) -> None:
        self.arena = memoryview(ARENAS[arena.path])


class NodeStore:
    """One node's: a process after another."""

    def __init__(self, world: World, index: int) -> None:
        self._world, self._name, self._number = world, node_name(index), 0
        self.process: Process | None = None
        self.store: SimulatedStore | None = None
        self.address = ""

    async def start(self) -> None:
        self._number += 1
        world = self._world
        self.process = process = Process(f"store of {self._name}#{self._number}", self._name)
        store = self.store = SimulatedStore(f"arena-{process.name}")
        self.address = f"{self._name}:{100 + self._number}"

        async def serve() -> None:
            server: Any = world.network.server()
            store_pb2_grpc.add_KVStoreServiceServicer_to_server(store, server)
            server.add_insecure_port(store_address(Path(self._name)))
            peers: Any = world.network.server()
            store_pb2_grpc.add_KVStorePeerServiceServicer_to_server(PeerServer(store.contents), peers)
            peers.add_insecure_port(self.address)

        await self._ask(serve())
        world.trace(f"{process.name} serves")

    async def keep(self) -> None:
        if self.process is None or not self.process.alive:
            await self.start()

    async def introduce(self, addresses: dict[str, str]) -> None:
        assert self.store is not None, "it was started"
        await self._ask(self.store.peers.set_nodes(self._name, addresses, 1))

    async def _ask(self, coroutine: Any) -> None:
        assert self.process is not None, "it was started"
        asked = self.process.spawn(coroutine)
        while self.process.alive and not asked.done():
            await asyncio.sleep(START_POLL_S)
        if not asked.done():
            raise HoldfastError(f"{self.process.name} died")
        asked.result()


class Stores:
    """The supervisor's component."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._nodes = [NodeStore(world, i) for i in range(NUM_NODES)]
        self._told: dict[str, str] = {}

    @property
    def processes(self) -> list[Process]:
        return [node.process for node in self._nodes if node.process is not None]

    async def start(self) -> None:
        for node in self._nodes:
            await node.start()
        await self._introduce()

    async def keep(self) -> None:
        await asyncio.sleep(CHECK_S)
        for node in self._nodes:
            await node.keep()
        await self._introduce()

    async def _introduce(self) -> None:
        addresses = {node_name(i): node.address for i, node in enumerate(self._nodes)}
        if addresses != self._told:
            for node in self._nodes:
                await node.introduce(addresses)
            self._told = addresses

    def owned(self) -> dict[str, list[Copy]]:
        """Copies by the sessions that they were made for."""
        owned: dict[str, list[Copy]] = {}
        for copy in self._copies():
            owned.setdefault(copy.owner, []).append(copy)
        return owned

    def damage(self) -> None:
        """Flip a bit of a copy."""
        rng = self._world.rng
        node = rng.choice(self._nodes)
        copies = [copy for copy in node.store.contents.copies if copy.crc is not None] if node.store else []
        if node.store is not None and copies:
            node.store.contents.data(rng.choice(copies))[rng.randrange(8)] ^= 4
            self._world.trace("a copy in a store is damaged")

    def _copies(self) -> list[Copy]:
        return [copy for node in self._nodes if node.store is not None for copy in node.store.contents.copies]
