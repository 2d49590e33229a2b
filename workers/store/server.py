"""The store's process: an arena in shared memory, and a gRPC server on a socket of this node."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import grpc

from holdfast import tls
from holdfast.errors import ConfigError
from holdfast.v1 import store_pb2, store_pb2_grpc
from holdfast.wire import SERVER_OPTIONS
from workers.store.contents import Contents
from workers.store.copies import SLAB_BYTES, Copy, CopyIndex
from workers.store.disk import DiskTier
from workers.store.folders import ARENA
from workers.store.peer_server import PeerServer, keys_of
from workers.store.peers import Peers
from workers.store.segments import SEGMENT_BYTES

log = logging.getLogger("holdfast.store")
SOCKET = "socket"
NOT_THERE = -1


def socket_of(folder: Path) -> str:
    """Where the store of this folder is reached."""
    return f"unix:{folder / SOCKET}"


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """The disk of a store."""

    folder: Path
    num_bytes: int
    segment_bytes: int = SEGMENT_BYTES


@dataclass(slots=True)
class _User:
    """One rank's stream."""

    space: bytes = b""
    reserved: dict[bytes, Copy] = field(default_factory=dict)
    pins: dict[int, list[Copy]] = field(default_factory=dict)


class KVStore(store_pb2_grpc.KVStoreServiceServicer):
    """One node's store. ``folder``: of its own, in memory (``/dev/shm``), on a path that all ranks of the node know.

    ``write_bytes_per_s``: what the copying to one other node may take of the network. ``zeroes``: the room of copies
    that are gone is overwritten.
    """

    def __init__(
        self,
        folder: Path,
        num_bytes: int,
        slab_bytes: int = SLAB_BYTES,
        *,
        disk: DiskConfig | None = None,
        write_bytes_per_s: float = 1e9,
        zeroes: bool = False,
    ) -> None:
        self._folder, self._num_bytes, self._slab_bytes = folder, num_bytes, slab_bytes
        self._zeroes = zeroes
        self._disk_config, self._write_bytes_per_s = disk, write_bytes_per_s
        self.contents: Contents
        self.peers: Peers
        self._numbers = count(1)
        self._servers: list[grpc.aio.Server] = []

    async def start(self, host: str | None = None) -> str:
        """Take the arena's memory and serve. What a former store left is removed.

        ``host``: where other nodes reach this store; returns its address there, or nothing. Raises ConfigError.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)
        # Ranks that still map a former arena must not see this one there.
        self._arena = self._folder / f"{ARENA}{os.getpid()}"
        try:
            with self._arena.open("w+b") as file:
                # Taken now: a rank that wrote to memory that is not there would be killed.
                os.posix_fallocate(file.fileno(), 0, self._num_bytes)
                arena = memoryview(mmap.mmap(file.fileno(), self._num_bytes))
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ConfigError(
                f"hicache_size: {self._num_bytes} bytes do not fit in {self._folder.parent}: {error.strerror}"
            ) from None
        self._open(arena)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        store_pb2_grpc.add_KVStoreServiceServicer_to_server(self, server)
        server.add_insecure_port(socket_of(self._folder))
        await self._serve(server)
        return await self._serve_peers(host) if host is not None else ""

    def _open(self, arena: memoryview) -> None:
        copies = CopyIndex(self._num_bytes, self._slab_bytes, zeroed=arena if self._zeroes else None)
        given, disk = self._disk_config, None
        if given is not None:
            try:
                disk = DiskTier(given.folder, given.num_bytes, copies, arena, given.segment_bytes)
            except OSError as error:
                shutil.rmtree(self._folder, ignore_errors=True)
                raise ConfigError(f"kv_disk_path: cannot use {given.folder}: {error.strerror or error}") from None
        self.contents = Contents(copies, arena, disk)
        self.peers = Peers(self.contents, self._write_bytes_per_s)

    async def _serve_peers(self, host: str) -> str:
        server = tls.server()
        store_pb2_grpc.add_KVStorePeerServiceServicer_to_server(PeerServer(self.contents), server)
        port = tls.listen(server, f"{host}:0")
        await self._serve(server)
        return f"{host}:{port}"

    async def _serve(self, server: grpc.aio.Server) -> None:
        await server.start()
        self._servers.append(server)

    async def stop(self) -> None:
        """End the servers, and remove the arena."""
        for server in self._servers:
            await server.stop(grace=None)
        if self._servers:
            await self.peers.stop()
            await self.contents.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._folder.parent.rmdir()  # if this was the cluster's last store here

    async def Use(
        self, requests: AsyncIterator[store_pb2.StoreRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[store_pb2.StoreResponse]:
        user = _User()
        try:
            async for request in requests:
                yield await self._answer(user, request)
        finally:
            for copy in user.reserved.values():
                self.contents.copies.abandon(copy)
            for pinned in user.pins.values():
                self._unpin(pinned)

    async def _answer(self, user: _User, request: store_pb2.StoreRequest) -> store_pb2.StoreResponse:
        match request.WhichOneof("request"):
            case "open":
                user.space = _space(request.open.space)
                arena = store_pb2.Arena(path=str(self._arena), size=self._num_bytes)
                return store_pb2.StoreResponse(arena=arena)
            case "reserve":
                return store_pb2.StoreResponse(reserved=self._reserve(user, request.reserve))
            case "complete":
                return store_pb2.StoreResponse(completed=self._complete(user, request.complete))
            case "pin":
                return store_pb2.StoreResponse(pinned=self._pin(user, request.pin))
            case "unpin":
                pinned = user.pins.pop(request.unpin.pin, [])
                damaged = {key for part in request.unpin.damaged for key in _keys(user.space, part)}
                copies = self.contents.copies
                copies.counters["damaged"] += copies.drop(c for c in pinned if c.key in damaged)
                self._unpin(pinned)
                return store_pb2.StoreResponse(unpinned=store_pb2.Unpinned())
            case "release":
                num_dropped = await self.contents.release(request.release)
                self.peers.release(request.release)
                return store_pb2.StoreResponse(released=store_pb2.Released(copies=num_dropped))
            case "owners":
                owners = await self.contents.owners()
                return store_pb2.StoreResponse(owners=store_pb2.Owners(session_ids=owners))
            case "find":
                _, tiers, missing = self._find(user.space, request.find)
                others = bool(missing) and self.peers.may_have(request.find.nodes)
                return store_pb2.StoreResponse(
                    found=store_pb2.FoundCopies(tiers=[bytes(where) for where in tiers], ask_others=others)
                )
            case "all":
                responses = [await self._answer(user, each) for each in request.all.requests]
                return store_pb2.StoreResponse(all=store_pb2.StoreResponses(responses=responses))
            case _:
                return store_pb2.StoreResponse(stats=self._stats())

    async def Find(self, request: store_pb2.WantedCopies, context: grpc.aio.ServicerContext) -> store_pb2.FoundCopies:
        keys, tiers, missing = self._find(_space(request.space), request)
        found = await self.peers.find(request.nodes, missing) if missing else ()
        for part, where in zip(keys, tiers, strict=True):
            where[:] = [
                tier or (store_pb2.TIER_PEER if key in found else 0) for key, tier in zip(part, where, strict=True)
            ]
        return store_pb2.FoundCopies(tiers=[bytes(where) for where in tiers])

    def _find(
        self, space: bytes, wanted: store_pb2.WantedCopies
    ) -> tuple[list[list[bytes]], list[bytearray], list[bytes]]:
        """Keys and tiers on this node, by group, and the keys that are not here."""
        keys = [_keys(space, part) for part in wanted.groups]
        tiers = [self.contents.tiers(part) for part in keys]
        missing = [
            key
            for part, where in zip(keys, tiers, strict=True)
            for key, tier in zip(part, where, strict=True)
            if not tier
        ]
        return keys, tiers, missing

    async def Bring(
        self, request: store_pb2.WantedCopies, context: grpc.aio.ServicerContext
    ) -> store_pb2.BroughtCopies:
        space, copies = _space(request.space), self.contents.copies
        keys = [key for part in request.groups for key in _keys(space, part) if not copies.has(key)]
        await self.contents.bring(keys, request.session_id)
        missing = [key for key in keys if not copies.has(key)]
        if missing:
            await self.peers.fetch(request.nodes, missing, request.session_id)
        return store_pb2.BroughtCopies(copies=sum(copies.has(key) for key in keys))

    def _reserve(self, user: _User, request: store_pb2.ReserveCopies) -> store_pb2.Reserved:
        offsets = []
        for key, owner in zip(_keys(user.space, request), request.session_ids, strict=True):
            copy = self.contents.copies.reserve(key, request.page_bytes, owner)
            if copy is not None:
                user.reserved[key] = copy
            offsets.append(copy.offset if copy is not None else NOT_THERE)
        return store_pb2.Reserved(offsets=offsets)

    def _complete(self, user: _User, request: store_pb2.CompleteCopies) -> store_pb2.Completed:
        num_complete = 0
        for key, crc, written in zip(_keys(user.space, request), request.crcs, request.written, strict=True):
            copy = user.reserved.pop(key)
            if written:
                self.contents.complete(copy, crc)
                self.peers.add(copy)
                num_complete += 1
            else:
                self.contents.copies.abandon(copy)
        return store_pb2.Completed(copies=num_complete)

    def _pin(self, user: _User, request: store_pb2.PinCopies) -> store_pb2.Pinned:
        groups, pinned = [], list[Copy]()
        for part in request.groups:
            found = [self.contents.copies.pin(key, request.session_id) for key in _keys(user.space, part)]
            pinned += [copy for copy in found if copy is not None]
            offsets = [copy.offset if copy is not None else NOT_THERE for copy in found]
            crcs = [copy.crc or 0 if copy is not None else 0 for copy in found]
            groups.append(store_pb2.PlacesOfGroup(offsets=offsets, crcs=crcs))
        for copy in pinned:
            if copy.is_replica:
                self.peers.add(copy)
        number = next(self._numbers)
        user.pins[number] = pinned
        return store_pb2.Pinned(pin=number, groups=groups)

    def _unpin(self, pinned: Sequence[Copy]) -> None:
        for copy in pinned:
            self.contents.copies.unpin(copy)

    def _stats(self) -> store_pb2.StoreStats:
        copies, disk = self.contents.copies, self.contents.disk
        return store_pb2.StoreStats(
            bytes_total=self._num_bytes,
            bytes_used=copies.num_bytes_used,
            copies=len(copies),
            counters=self.contents.counters + self.peers.counters,
            disk_bytes_used=disk.num_bytes_used if disk is not None else 0,
            node=self.peers.node,
            replicas=self.peers.replicas,
        )


def _space(name: str) -> bytes:
    return name.encode() + b"\0"


def _keys(
    space: bytes, part: store_pb2.KeysOfGroup | store_pb2.ReserveCopies | store_pb2.CompleteCopies
) -> list[bytes]:
    return keys_of(store_pb2.KeysOfPrefix(prefix=space + bytes([part.group]), keys=part.keys))
