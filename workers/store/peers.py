"""The stores of other nodes, as one store sees them: its replicas go there, and what its ranks lack comes from there.

The nodes are a ring, in the order of their names: a node's copies are copied to those that follow it. So each store
knows, of any node, which others have its copies, also of one that has died.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import grpc

from holdfast import tls
from holdfast.errors import InvalidRequest
from holdfast.v1 import store_pb2, store_pb2_grpc
from holdfast.wire import was_closed
from workers.store.contents import Contents
from workers.store.copies import Copy
from workers.store.peer_server import in_messages, message_of, parts_of, take

log = logging.getLogger("holdfast.store")
MAX_WAITING = 65_536
"""Copies that are to be sent to a peer. When there are more, those that waited longest are not: no copy is owed."""
SENT_TOGETHER = 64
RETRY_S = 0.5
TIMEOUT_S = 5.0
"""Of one message to a peer."""
FIND_TIMEOUT_S = 0.5
"""A turn waits for the answer."""


class Peers:
    """Lives in the store's event loop. ``bytes_per_s``: what the sending to one peer may take of the network."""

    def __init__(self, contents: Contents, bytes_per_s: float) -> None:
        self._contents, self._bytes_per_s = contents, bytes_per_s
        self._links: dict[str, _PeerLink] = {}
        self._ring: list[str] = []
        self._num_replicas = 0
        self.node = ""
        self.counters: Counter[str] = Counter()

    @property
    def replicas(self) -> list[str]:
        """The nodes that this one's copies are copied to."""
        return self._followers(self.node)

    async def set_nodes(self, node: str, addresses: Mapping[str, str], num_replicas: int) -> None:
        """``addresses``: of the stores of all nodes that are alive. ``node``: this store's own."""
        former = {name: link.address for name, link in self._links.items() if name in self.replicas}
        # All at once: copies are made meanwhile.
        gone = [
            self._links.pop(name) for name, link in list(self._links.items()) if addresses.get(name) != link.address
        ]
        self.node, self._num_replicas = node, num_replicas
        self._ring = sorted({*addresses, node})
        for name, address in addresses.items():
            if name not in self._links and name != node:
                self._links[name] = _PeerLink(name, address, self._contents, self._bytes_per_s, self.counters)
        for name in self.replicas:
            if former.get(name) != self._links[name].address:
                for copy in self._contents.copies:
                    if copy.crc is not None and not copy.is_replica:
                        self._links[name].add(copy)
        for link in gone:
            await link.stop()

    def add(self, copy: Copy) -> None:
        """A copy of this node is complete, or another node's is used here."""
        copy.is_replica = False
        for name in self.replicas:
            self._links[name].add(copy)

    def release(self, what: store_pb2.ReleaseCopies) -> None:
        """This was released here. What others have used stays."""
        for link in self._links.values():
            link.release(what)
        if what.session_id:
            for copy in self._contents.copies.owned(what.session_id):
                self.add(copy)

    def may_have(self, nodes: Iterable[str]) -> bool:
        """Whether ``find`` would ask anybody."""
        return bool(self._holders(nodes))

    async def find(self, nodes: Iterable[str], keys: Sequence[bytes]) -> set[bytes]:
        """Which of these the peers have that may: ``nodes``, and their replicas."""
        found = set[bytes]()
        for link in self._holders(nodes):
            missing = [key for key in keys if key not in found]
            if not missing:
                break
            found.update(await link.find(missing))
        return found

    async def fetch(self, nodes: Iterable[str], keys: Sequence[bytes], user: str) -> None:
        """Bring copies here, as far as the peers have them."""
        for link in self._holders(nodes):
            missing = [key for key in keys if key not in self._contents.copies]
            if not missing:
                return
            for copy in await link.fetch(missing, user):
                self.add(copy)

    async def stop(self) -> None:
        for link in self._links.values():
            await link.stop()

    def _followers(self, node: str) -> list[str]:
        """The nodes after this one on the ring, whether it is there itself or not."""
        at = bisect.bisect_right(self._ring, node)
        others = [name for name in self._ring[at:] + self._ring[:at] if name not in (node, self.node)]
        return others[: self._num_replicas]

    def _holders(self, nodes: Iterable[str]) -> list[_PeerLink]:
        names = dict.fromkeys(nodes)
        for node in list(names):
            names |= dict.fromkeys(self._followers(node))
        return [self._links[name] for name in names if name in self._links]


class _PeerLink:
    """One peer."""

    def __init__(self, node: str, address: str, contents: Contents, bytes_per_s: float, counters: Counter[str]) -> None:
        self.address = address
        self._node, self._contents, self._bytes_per_s, self._counters = node, contents, bytes_per_s, counters
        self._connect()
        self._waiting: deque[Copy] = deque(maxlen=MAX_WAITING)
        self._released: dict[tuple[str, str], store_pb2.ReleaseCopies] = {}
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._send())

    def _connect(self) -> None:
        self._channel = tls.channel(self.address)
        self._stub = store_pb2_grpc.KVStorePeerServiceStub(self._channel)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    def add(self, copy: Copy) -> None:
        """Send a copy some time."""
        self._waiting.append(copy)
        self._changed.set()

    def release(self, what: store_pb2.ReleaseCopies) -> None:
        """Have the peer release it too, after what is being sent."""
        self._released[what.session_id, what.tenant] = what
        self._changed.set()

    async def find(self, keys: Sequence[bytes]) -> list[bytes]:
        """Which of these the peer has; none if it does not answer in time, or leaves."""
        with self._unless_lost():
            request = store_pb2.PeerKeys(parts=parts_of(keys))
            answer = await self._stub.Find(request, timeout=FIND_TIMEOUT_S)
            return [key for key, tier in zip(keys, b"".join(answer.tiers), strict=True) if tier]
        return []

    async def fetch(self, keys: Sequence[bytes], user: str) -> list[Copy]:
        """Keep copies of the peer's. Returns those that arrived."""
        taken: list[Copy] = []
        with self._unless_lost():
            call = self._stub.Fetch(store_pb2.PeerKeys(parts=parts_of(keys), session_id=user), timeout=TIMEOUT_S)
            try:
                async for message in call:
                    taken += take(self._contents, message, is_replica=False)
                    self._counters["bytes_fetched"] += len(message.data)
            finally:
                call.cancel()
        return taken

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        """Ends early when the peer's answer does, or this link."""
        try:
            yield
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, InvalidRequest) as error:
            log.info("node %s does not give its copies of KV: %s", self._node, error)
        except asyncio.CancelledError:
            if not was_closed():
                raise

    async def _send(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                while self._released or self._waiting:
                    for key, what in list(self._released.items()):
                        await self._stub.Release(what, timeout=TIMEOUT_S)
                        del self._released[key]
                    await self._send_some()
            except grpc.aio.AioRpcError as error:
                # It will be tried again until the supervisor says that this peer is gone.
                log.info("node %s takes no copies now: %s", self._node, error.code().name)
                self._changed.set()
                await asyncio.sleep(RETRY_S)
                await self._channel.close()
                self._connect()  # with this process's certificate of now

    async def _send_some(self) -> None:
        some = [self._waiting.popleft() for _ in range(min(SENT_TOGETHER, len(self._waiting)))]
        try:
            there = set(await self._asked(some))
            for together in in_messages([copy for copy in some if copy.key not in there]):
                copies = [copy for copy in together if not copy.is_gone]
                if copies:
                    message = message_of(self._contents, copies)
                    await self._stub.Put(message, timeout=TIMEOUT_S)
                    self._counters["replicated"] += len(copies)
                    await asyncio.sleep(len(message.data) / self._bytes_per_s)
        except grpc.aio.AioRpcError:
            self._waiting.extendleft(reversed(some))
            raise

    async def _asked(self, copies: Sequence[Copy]) -> list[bytes]:
        """Which of these the peer has already."""
        keys = [copy.key for copy in copies]
        answer = await self._stub.Find(store_pb2.PeerKeys(parts=parts_of(keys)), timeout=TIMEOUT_S)
        return [key for key, tier in zip(keys, b"".join(answer.tiers), strict=True) if tier]
