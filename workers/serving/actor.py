"""The Ray actors around one rank of a worker, and around a node's KV store."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from holdfast import tls
from holdfast.lifeline import open_lifeline
from holdfast.processes import NodeProcess
from holdfast.tls import Identity
from workers.config import EngineConfig
from workers.progress import Progress, progress_told_to
from workers.store.folders import node_folder
from workers.store.server import DiskConfig, KVStore

if TYPE_CHECKING:
    from torch.distributed import Store

    from workers.serving.rank_server import RankServer
    from workers.serving.worker_server import WorkerServer

log = logging.getLogger("holdfast.rank")


@dataclass(frozen=True, slots=True)
class ServingRank:
    """A rank that serves. ``config``: as its supervisor gave it; ``kv_bytes``: what its pools hold."""

    incarnation: int
    config: EngineConfig
    address: str
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class ServingStore:
    """A node's KV store that serves. ``node``: the node's name; ``address``: for other nodes."""

    folder: Path
    node: str
    address: str
    num_bytes: int


@ray.remote
class RankActor:
    """One rank: starts its server, and runs until it is stopped or killed, or its group fails."""

    def __init__(
        self, worker_id: str, incarnation: int, rank: int, size: int, config: EngineConfig, host: str | None
    ) -> None:
        self._identity = (worker_id, incarnation)
        self._rank, self._size = rank, size
        self._config = config
        self._host = host or ray.util.get_node_ip_address()
        self._stopped = asyncio.Event()
        self._store: Store | None = None
        self._server: WorkerServer | RankServer | None = None
        self._serving: ServingRank | None = None
        self._progress: Progress | None = None

    async def use_identity(self, identity: Identity | None) -> None:
        """Who this process is, before it starts to serve, and again when its certificate is renewed."""
        tls.use_identity(identity)

    async def process(self) -> NodeProcess:
        return NodeProcess.this(ray.get_runtime_context().get_node_id())

    async def progress(self) -> Progress | None:
        """How far ``start`` is, or was last; None: it has loaded nothing yet."""
        return self._progress

    async def open_store(self) -> tuple[str, int]:
        """On rank 0, before ``start``: open the group's store. Returns its address."""
        from workers.serving.group import open_store

        store = open_store(self._host, self._size, self._config.collective_timeout_s)
        self._store = store
        return self._host, store.port

    async def start(self, store: tuple[str, int] | None) -> ServingRank:
        """Load this rank's shard of the model and serve. ``store``: the group's, if there is one."""
        node, given = ray.get_runtime_context().get_node_id(), self._config
        if self._config.kv_store is not None:
            self._config = replace(self._config, kv_store=node_folder(self._config.kv_store, node))
        # Imported here, because only a rank's process may import torch.
        from workers.models.parallel import Shard
        from workers.serving.group import RankIdentity, join_store, start_rank

        if store is not None and self._store is None:
            self._store = join_store(*store, self._size, self._config.collective_timeout_s)
        shard, lifeline = Shard(self._rank, self._size), open_lifeline(self._host)
        identity = RankIdentity(*self._identity, shard, self._host, _node_name(), lifeline)
        with progress_told_to(self._note):
            self._server, address = await start_rank(identity, self._config, self._store, self._die)
        # What was loaded stays: looking for garbage among torch's 400,000 objects took 100 ms, in the middle of a step.
        gc.collect()
        gc.freeze()
        self._serving = ServingRank(self._identity[1], given, address, self._server.rank.kv_bytes)
        return self._serving

    async def serving(self) -> ServingRank | None:
        """What ``start`` returned; None: it has not."""
        return self._serving

    async def wait(self) -> None:
        """Returns when the rank was stopped. Ray raises ActorDiedError when its process died."""
        await self._stopped.wait()

    async def expect_end(self) -> None:
        """The worker is about to be stopped: do not treat the end of its ranks as a failure."""
        if self._server is not None:
            self._server.expect_end()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
        self._stopped.set()

    def _note(self, progress: Progress) -> None:
        self._progress = progress

    def _die(self, reason: str) -> None:
        # The other ranks end too, and the supervisor starts the next incarnation.
        log.critical("rank %d of worker %s ends: %s", self._rank, self._identity[0], reason)
        os.kill(os.getpid(), signal.SIGKILL)


@ray.remote
class KVStoreActor:
    """One node's KV store. Serves until it is stopped or killed."""

    def __init__(
        self,
        folder: Path,
        num_bytes: int,
        disk: DiskConfig | None,
        host: str | None,
        write_bytes_per_s: float,
        zeroes: bool,
    ) -> None:
        self._folder, self._num_bytes = folder, num_bytes
        self._store = KVStore(folder, num_bytes, disk=disk, write_bytes_per_s=write_bytes_per_s, zeroes=zeroes)
        self._host = host or ray.util.get_node_ip_address()
        self._serving: ServingStore | None = None

    async def use_identity(self, identity: Identity | None) -> None:
        """Who this process is, before it starts to serve, and again when its certificate is renewed."""
        tls.use_identity(identity)

    async def process(self) -> NodeProcess:
        return NodeProcess.this(ray.get_runtime_context().get_node_id())

    async def start(self) -> ServingStore:
        """Take the memory, and serve. Raises ConfigError."""
        self._serving = ServingStore(self._folder, _node_name(), await self._store.start(self._host), self._num_bytes)
        return self._serving

    async def serving(self) -> ServingStore | None:
        """What ``start`` returned; None: it has not."""
        return self._serving

    async def set_nodes(self, node: str, addresses: dict[str, str], num_replicas: int) -> None:
        """See ``Peers``."""
        await self._store.peers.set_nodes(node, addresses, num_replicas)

    async def stop(self) -> None:
        await self._store.stop()


def _node_name() -> str:
    """This node's, as operators see it, and as ranks and stores say where they are."""
    return f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()[:8]}"
