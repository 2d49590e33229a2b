"""The nodes' KV stores, one for each worker's ranks: the real servers and clients, with memory in place of a file."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.v1 import store_pb2, store_pb2_grpc
from tests.simulation.loop import Process
from tests.simulation.world import World
from workers.store.client import StoreClient
from workers.store.contents import Contents
from workers.store.copies import is_nobody
from workers.store.peer_server import PeerServer
from workers.store.segments import Segments
from workers.store.server import DiskConfig, KVStore

NUM_NODES = 2
NUM_BYTES, SLAB_BYTES = 16 * 1024, 2048
DISK_BYTES, SEGMENT_BYTES = 64 * 1024, 8192
"""Little: copies give way to others."""
DAMAGE_EVERY = 400
"""Bytes of a damaged file."""
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

    def __init__(self, name: str, disk: DiskConfig | None) -> None:
        super().__init__(Path(name), NUM_BYTES, SLAB_BYTES, disk=disk, write_bytes_per_s=WRITE_BYTES_PER_S)
        self._arena = Path(name)

    def open(self) -> None:
        """In the store's process."""
        arena = ARENAS[str(self._arena)] = bytearray(NUM_BYTES)
        self._open(memoryview(arena))

    def end(self, torn_bytes: int) -> None:
        """What the kernel does for a process that died. Of what it wrote last, so much did not reach the disk."""
        if not hasattr(self, "contents") or self.contents.disk is None:
            return
        segments = self.contents.disk._segments
        if segments._files:
            file = segments._files[max(segments._files)]
            file.truncate(max(0, file.seek(0, os.SEEK_END) - torn_bytes))
        segments.close()


class FailingSegments(Segments):
    """On a disk that fails at times."""

    fails = 0.0
    rng = random.Random()

    def append(self, key: bytes, owner: str, data: bytes | memoryview, crc: int) -> None:
        self._perhaps_fail()
        super().append(key, owner, data, crc)

    def read(self, key: bytes, owner: str) -> tuple[bytes, int, str] | None:
        self._perhaps_fail()
        return super().read(key, owner)

    def release(self, owner: str) -> None:
        self._perhaps_fail()
        super().release(owner)

    def _perhaps_fail(self) -> None:
        if self.rng.random() < self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class SimulatedClient(StoreClient):
    """Maps such an arena."""

    def _map(self, arena: store_pb2.Arena) -> None:
        self.arena = memoryview(ARENAS[arena.path])


class NodeStore:
    """One node's: a process after another."""

    def __init__(self, world: World, index: int, disks: Path | None) -> None:
        self._world, self._name, self._number = world, node_name(index), 0
        self._disk = DiskConfig(disks / self._name, DISK_BYTES, SEGMENT_BYTES) if disks is not None else None
        self.process: Process | None = None
        self.store: SimulatedStore | None = None
        self.address = ""

    async def start(self) -> None:
        self._number += 1
        world = self._world
        self.process = process = Process(f"store of {self._name}#{self._number}", self._name)
        if self.store is not None:
            self.store.end(world.rng.choice((0, 0, 7, 300)) if self._disk is not None else 0)
        store = self.store = SimulatedStore(f"arena-{process.name}", self._disk)
        self.address = f"{self._name}:{100 + self._number}"

        async def serve() -> None:
            store.open()
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

    def __init__(self, world: World, disks: Path | None) -> None:
        """``disks``: a folder for those of all nodes; None: they have none."""
        self._world = world
        self.have_disks = disks is not None
        self._nodes = [NodeStore(world, i, disks) for i in range(NUM_NODES)]
        FailingSegments.fails, FailingSegments.rng = (
            0.0,
            random.Random(world.rng.random()) if disks else random.Random(),
        )
        self._told: dict[str, str] = {}

    @property
    def processes(self) -> list[Process]:
        return [node.process for node in self._nodes if node.process is not None]

    async def start(self) -> None:
        for node in self._nodes:
            await node.keep()
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

    def owners(self) -> set[str]:
        """The sessions that there are copies of, in memory or on a disk, which no other session has used."""
        owners = {copy.owner for contents in self._contents() for copy in contents.copies if not copy.is_shared}
        disks = [contents.disk._segments for contents in self._contents() if contents.disk is not None]
        owners |= {record.owner for disk in disks for record in disk._records.values() if not record.is_shared}
        return {owner for owner in owners if not is_nobody(owner)}

    def damage(self) -> None:
        """Flip a bit of a copy."""
        rng = self._world.rng
        contents = rng.choice(self._contents() or [None])
        copies = [copy for copy in contents.copies if copy.crc is not None] if contents is not None else []
        if contents is not None and copies:
            contents.data(rng.choice(copies))[rng.randrange(8)] ^= 4
            self._world.trace("a copy in a store is damaged")

    def damage_disk(self) -> None:
        """Flip bits of a file, in copies and between them."""
        rng = self._world.rng
        disks = [contents.disk._segments for contents in self._contents() if contents.disk is not None]
        files = [file for disk in disks for file in disk._files.values() if not file.closed]
        if not files:
            return
        file = rng.choice(files)
        for at in range(rng.randrange(DAMAGE_EVERY), file.seek(0, os.SEEK_END), DAMAGE_EVERY):
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 4]))
        self._world.trace("bits on a disk are flipped")

    def close(self) -> None:
        """The run is over."""
        for node in self._nodes:
            if node.store is not None:
                node.store.end(0)

    def _contents(self) -> list[Contents]:
        stores = [node.store for node in self._nodes if node.store is not None]
        return [store.contents for store in stores if hasattr(store, "contents")]
