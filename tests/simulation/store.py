"""The nodes' KV store, one for all ranks: the real server and clients, with memory in place of the arena's file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from holdfast.v1 import store_pb2, store_pb2_grpc
from tests.simulation.loop import Process
from tests.simulation.world import World
from workers.store.client import StoreClient
from workers.store.copies import Copy
from workers.store.server import KVStore

HOST, ADDRESS = "node", "node:77"
NUM_BYTES, SLAB_BYTES = 16 * 1024, 2048
"""Little: copies give way to others."""
CHECK_S = 0.5
ARENAS: dict[str, bytearray] = {}


class SimulatedStore(KVStore):
    """Serves on the simulated network."""

    def __init__(self, name: str) -> None:
        super().__init__(Path(name), NUM_BYTES, SLAB_BYTES)
        self._arena = Path(name)
        ARENAS[name] = bytearray(NUM_BYTES)
        self._open(memoryview(ARENAS[name]))


class SimulatedClient(StoreClient):
    """Maps such an arena."""

    def _map(self, arena: store_pb2.Arena) -> None:
        self.arena = memoryview(ARENAS[arena.path])


class Stores:
    """The supervisor's component."""

    def __init__(self, world: World) -> None:
        self._world, self._number = world, 0
        self.process: Process | None = None
        self.store: SimulatedStore | None = None

    async def start(self) -> None:
        self._number += 1
        world = self._world
        self.process = process = Process(f"store#{self._number}", HOST)
        store = self.store = SimulatedStore(f"arena-{process.name}")

        async def serve() -> None:
            server: Any = world.network.server()
            store_pb2_grpc.add_KVStoreServiceServicer_to_server(store, server)
            server.add_insecure_port(ADDRESS)

        await process.spawn(serve())
        world.trace(f"{process.name} serves")

    async def keep(self) -> None:
        await asyncio.sleep(CHECK_S)
        if self.process is None or not self.process.alive:
            await self.start()

    def owned(self) -> dict[str, list[Copy]]:
        """Copies by the sessions that they were made for."""
        if self.store is None:
            return {}
        return {owner: list(copies.values()) for owner, copies in self.store.contents.copies._by_owner.items()}

    def damage(self) -> None:
        """Flip a bit of a copy."""
        if self.store is None:
            return
        copies = [copy for copy in self.store.copies._copies.values() if copy.crc is not None]
        if copies:
            copy = self._world.rng.choice(copies)
            ARENAS[str(self.store._arena)][copy.offset + self._world.rng.randrange(8)] ^= 4
            self._world.trace("a copy in the store is damaged")
