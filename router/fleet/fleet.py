"""The workers that a router reaches, by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.errors import StaleEpoch, WorkerNotFound
from router.fleet.homes import Homes
from router.fleet.link import Home, WorkerAddress, WorkerLink
from router.fleet.placement import Placement


class Fleet:
    """Links to the workers that the supervisor announced.

    ``on_attached`` is called whenever a link is established, also after a reconnect.
    """

    def __init__(
        self, lease_s: float, placement: Placement, homes: Homes, on_attached: Callable[[WorkerLink], None]
    ) -> None:
        self._lease_s = lease_s
        self._placement = placement
        self._homes = homes
        self._on_attached = on_attached
        self._links: dict[str, WorkerLink] = {}
        self._epoch = 0

    async def set_workers(self, addresses: list[WorkerAddress], epoch: int = 0) -> None:
        """Replace the set of workers. A new incarnation of a worker replaces the previous one.

        ``epoch``: of the supervisor that says so; 0: there is only one. Raises StaleEpoch for one that was replaced.
        """
        if epoch < self._epoch:
            raise StaleEpoch(f"the cluster has a supervisor of epoch {self._epoch}; this one's is {epoch}")
        self._epoch = epoch
        announced = {address.name: address for address in addresses}
        gone = [self._links.pop(name) for name in self._links.keys() - announced.keys()]
        for name, address in announced.items():
            if name not in self._links:
                self._links[name] = WorkerLink(address, self._lease_s, self._on_attached)
        # Last: another set may be announced while a link is being closed.
        for link in gone:
            self._placement.forget(link.name)
            await link.close()

    async def wait_for_one(self, timeout_s: float) -> None:
        """Returns when a worker is alive, or after ``timeout_s``."""
        waiting = [asyncio.create_task(link.ready.wait()) for link in self._links.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    def link(self, name: str) -> WorkerLink | None:
        """The worker that a pin names, if it is alive."""
        link = self._links.get(name)
        return link if link is not None and link.alive else None

    async def home(self, name: str) -> Home:
        """Of a worker that a pin names, also if it is lost."""
        link = self._links.get(name)
        return link.home if link is not None and link.home.nodes else await self._homes.of(name)

    def near(self, home: Home) -> list[str]:
        """The workers whose nodes have copies of that worker's KV."""
        nodes = {*home.nodes, *home.replicas}
        with_store = [link for link in self.alive() if link.stats.HasField("kv_store")]
        return [link.name for link in with_store if nodes.intersection(link.home.nodes)]

    def alive(self) -> list[WorkerLink]:
        """All workers that are alive."""
        return [link for link in self._links.values() if link.alive]

    def admitting(self) -> list[WorkerLink]:
        """The workers that are alive and not draining."""
        return [link for link in self.alive() if not link.stats.draining]

    def worker(self, worker_id: str) -> WorkerLink:
        """The living incarnation of a worker, the latest if there are several; or that of a pin's name.

        Raises WorkerNotFound.
        """
        links = sorted(self.alive(), key=lambda link: -link.address.incarnation)
        found = next((link for link in links if worker_id in (link.address.worker_id, link.name)), None)
        if found is None:
            names = ", ".join(sorted(link.address.worker_id for link in links))
            raise WorkerNotFound(f"no worker {worker_id} is alive; alive: {names or 'none'}")
        return found

    @property
    def context_len(self) -> int:
        """The longest sequence that every living worker accepts; 0 while none is alive."""
        return min((link.welcome.context_len for link in self._links.values() if link.welcome), default=0)

    @property
    def page_size(self) -> int:
        """Tokens of a KV page; 0 while no worker is alive."""
        return next((link.welcome.page_size for link in self._links.values() if link.welcome), 0)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV a worker has room for, by its last beat; the least of the living workers'."""
        rooms = (max((group.total for group in link.stats.groups), default=0) for link in self.alive())
        return self.page_size * min(rooms, default=0)

    @property
    def vocab_size(self) -> int:
        """0 while no worker is alive."""
        return next((link.welcome.vocab_size for link in self._links.values() if link.welcome), 0)

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
