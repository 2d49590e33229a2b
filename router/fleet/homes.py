"""Where copies of each worker's KV are, also of workers that are gone. The journal keeps it, for routers to come."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable

from holdfast.errors import HoldfastError
from router.fleet.link import Home, WorkerLink
from router.journal.interface import Journal

log = logging.getLogger("holdfast.router")
SYSTEM, PREFIX = "workers", "home/"
"""Under which name the journal has them, where tenants have their objects."""
MAX_LOST = 1024
"""Lost workers whose homes are remembered."""
LOOK_EVERY_S, RETRY_S = 1.0, 0.2


class Homes:
    """One router's view of all workers' homes."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._homes: OrderedDict[str, Home] = OrderedDict()
        self._loaded = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, alive: Callable[[], Iterable[WorkerLink]]) -> None:
        """Load what the journal has, then keep it up to date."""
        self._task = asyncio.create_task(self._keep(alive))

    async def of(self, worker: str) -> Home:
        """Of a worker that a pin names."""
        await self._loaded.wait()
        return self._homes.get(worker, Home())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self, alive: Callable[[], Iterable[WorkerLink]]) -> None:
        while True:
            try:
                if not self._loaded.is_set():
                    await self._load()
                await self._write(alive())
                await asyncio.sleep(LOOK_EVERY_S)
            except HoldfastError as error:
                log.info("the homes of workers are not in the journal yet: %s", error.message)
                await asyncio.sleep(RETRY_S)

    async def _load(self) -> None:
        found = [(key.removeprefix(PREFIX), value) for key, value in await self._journal.list_objects(SYSTEM, PREFIX)]
        found.sort(key=lambda each: int(each[0].rpartition("@")[2]))  # incarnations: the latest last
        if gone := [PREFIX + name for name, _ in found[:-MAX_LOST]]:
            await self._journal.delete_objects(SYSTEM, gone)
        for name, value in found[-MAX_LOST:]:
            nodes, replicas = json.loads(value)
            self._homes[name] = Home(tuple(nodes), tuple(replicas))
        self._loaded.set()

    async def _write(self, links: Iterable[WorkerLink]) -> None:
        homes = {link.name: link.home for link in links if link.stats.HasField("kv_store")}
        changed = {name: home for name, home in homes.items() if self._homes.get(name) != home}
        if changed:
            objects = {
                PREFIX + name: json.dumps([home.nodes, home.replicas]).encode() for name, home in changed.items()
            }
            await self._journal.put_objects(SYSTEM, objects)
            self._homes.update(changed)
            while len(self._homes) > MAX_LOST:
                self._homes.popitem(last=False)
