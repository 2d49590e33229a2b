"""The nodes' KV stores: an actor on each, started again when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.ray_backend.processes import (
    actor_options,
    answer_of,
    end_on_node,
    find_actor,
    living_nodes,
    on_node,
    ray_errors,
)
from holdfast.deadlines import within
from holdfast.processes import NodeProcess
from holdfast.tls import STORE, Identity
from workers.serving.actor import KVStoreActor, ServingStore
from workers.store.folders import node_folder
from workers.store.server import DiskConfig

log = logging.getLogger("holdfast.cluster")
CHECK_S = 0.5
SILENCE_S = 3.0
"""A store that does not answer for this long is replaced: its ranks have given it up before."""


class NodeStores:
    """A store on every node that is alive. ``folder``: the cluster's, where each node has one of its own.

    ``size_of``: a node's bytes of memory; a node for which it says 0 has no store yet. Asked until it says more.

    ``ranks_on``: the nodes that have ranks now; only stores on such nodes copy to each other. ``host``: where all of
    them listen for each other; None: each at its node's address.
    """

    def __init__(
        self,
        folder: Path,
        size_of: Callable[[str], int],
        disk: DiskConfig | None,
        *,
        ranks_on: Callable[[], Iterable[str]],
        host: str | None,
        issue: Callable[[str], Identity | None],
        num_replicas: int,
        write_bytes_per_s: float,
        zeroes: bool,
        detached: bool,
    ) -> None:
        self._detached = detached
        self._folder, self._num_replicas, self._ranks_on = folder, num_replicas, ranks_on
        self._issue = issue
        self._size_of, self._sizes = size_of, dict[str, int]()
        self._given = (disk, host, write_bytes_per_s, zeroes)
        self._actors: dict[str, Any] = {}
        self._addresses: dict[str, tuple[str, str]] = {}
        """By node: its name, and its store's address."""
        self._homes: set[str] = set()
        """Nodes that have had ranks: one whose worker is just restarting still has copies."""
        self._told: dict[str, tuple[str, str]] = {}
        self._processes: dict[str, NodeProcess] = {}

    def actor_names(self) -> list[str]:
        """Of all nodes' stores, as Ray knows them."""
        return [_actor_name(node) for node in living_nodes()]

    async def start(self) -> None:
        """Start a store on every node that has none, and whose size is known: those of another supervisor are kept.

        Raises HoldfastError.
        """
        await asyncio.gather(*(self._start(node) for node in living_nodes() - self._actors.keys()))
        await self._introduce()

    async def keep(self) -> None:
        """Look once at every node: start a store where there is none, and another where one died or hangs."""
        await asyncio.sleep(CHECK_S)
        nodes = await asyncio.to_thread(living_nodes)  # it waits for a GCS that is gone
        for gone in self._actors.keys() - nodes:
            del self._actors[gone]
            self._processes.pop(gone, None)
            self._addresses.pop(gone, None)
        await asyncio.gather(*(self._keep(node) for node in nodes))
        await self._introduce()

    async def renew(self) -> None:
        """Give every store a new certificate."""
        await asyncio.gather(*(actor.use_identity.remote(self._issue(STORE)) for actor in self._actors.values()))

    async def stop(self) -> None:
        """End all stores, and remove what they hold."""
        actors, self._actors = self._actors, {}
        stops = [within(SILENCE_S, actor.stop.remote()) for actor in actors.values()]
        await asyncio.gather(*stops, return_exceptions=True)
        for actor in actors.values():
            ray.kill(actor)

    async def _keep(self, node: str) -> None:
        actor = self._actors.get(node)
        if actor is not None:
            try:
                await within(SILENCE_S, actor.process.remote())
                return
            except (RayError, TimeoutError) as error:
                log.warning("the KV store of node %s is lost (%s); starting another", node[:8], type(error).__name__)
            await self._end(node, actor)
        await self._start(node)

    async def _start(self, node: str) -> None:
        found = find_actor(_actor_name(node))
        if found is not None and await self._adopt(node, found):
            return
        # Once known, it stays: a worker may be restarting when its node's store is.
        num_bytes = self._sizes[node] = self._sizes.get(node) or self._size_of(node)
        if not num_bytes:
            return
        actor_class: Any = KVStoreActor
        options = actor_options(_actor_name(node), detached=self._detached)
        with ray_errors(f"the KV store of node {node[:8]} did not start"):
            actor = actor_class.options(num_cpus=0, scheduling_strategy=on_node(node), **options).remote(
                node_folder(self._folder, node), num_bytes, *self._given
            )
            self._actors[node] = actor
            self._processes[node] = await actor.process.remote()
            await actor.use_identity.remote(self._issue(STORE))
            self._serves(node, await actor.start.remote())

    async def _adopt(self, node: str, actor: Any) -> bool:
        """Keep a store that another supervisor has started, if it serves; else end it."""
        self._actors[node] = actor
        process = await answer_of(actor.process.remote(), SILENCE_S)
        if process is not None:
            self._processes[node] = process
        serving = await answer_of(actor.serving.remote(), SILENCE_S)
        if serving is None or serving.folder != node_folder(self._folder, node):
            await self._end(node, actor)
            return False
        await answer_of(actor.use_identity.remote(self._issue(STORE)), SILENCE_S)
        self._serves(node, serving)
        return True

    def _serves(self, node: str, store: ServingStore) -> None:
        self._sizes[node], self._addresses[node] = store.num_bytes, (store.node, store.address)

    async def _introduce(self) -> None:
        """Tell all stores of each other, when there are others than before."""
        self._homes.update(self._ranks_on())
        known = {node: told for node, told in self._addresses.items() if node in self._homes}
        if self._told == known:
            return
        addresses = dict(known.values())
        tells = [
            within(SILENCE_S, self._actors[node].set_nodes.remote(name, addresses, self._num_replicas))
            for node, (name, _) in known.items()
        ]
        with ray_errors("a KV store does not answer"):
            await asyncio.gather(*tells)
        self._told = known

    async def _end(self, node: str, actor: Any) -> None:
        """End a store whatever state it is in."""
        del self._actors[node]
        self._addresses.pop(node, None)
        ray.kill(actor)
        process = self._processes.pop(node, None)
        if process is not None:
            await end_on_node(process)


def _actor_name(node: str) -> str:
    return f"store-{node}"
