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

from holdfast.errors import ConfigError
from holdfast.v1 import store_pb2, store_pb2_grpc
from holdfast.wire import SERVER_OPTIONS
from workers.store.copies import NOBODY, SLAB_BYTES, Copy, CopyIndex
from workers.store.disk import DiskTier
from workers.store.folders import ARENA
from workers.store.segments import SEGMENT_BYTES

log = logging.getLogger("holdfast.store")
KEY_BYTES = 16
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
    """One node's store. ``folder``: of its own, in memory (``/dev/shm``), on a path that all ranks of the node know."""

    def __init__(
        self, folder: Path, num_bytes: int, slab_bytes: int = SLAB_BYTES, *, disk: DiskConfig | None = None
    ) -> None:
        self._folder, self._num_bytes, self._disk_config = folder, num_bytes, disk
        self._disk: DiskTier | None = None
        self._copies = CopyIndex(num_bytes, slab_bytes)
        self._numbers = count(1)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Take the arena's memory and serve. What a former store left is removed. Raises ConfigError."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(mode=0o700, parents=True)
        # Ranks that still map a former arena must not see this one there.
        self._arena = self._folder / f"{ARENA}{os.getpid()}"
        try:
            with self._arena.open("wb") as file:
                # Taken now: a rank that wrote to memory that is not there would be killed.
                os.posix_fallocate(file.fileno(), 0, max(1, self._num_bytes))
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ConfigError(
                f"hicache_size: {self._num_bytes} bytes do not fit in {self._folder.parent}: {error.strerror}"
            ) from None
        if self._disk_config is not None:
            self._disk = self._open_disk(self._disk_config)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        store_pb2_grpc.add_KVStoreServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(socket_of(self._folder))
        await self._server.start()

    def _open_disk(self, disk: DiskConfig) -> DiskTier:
        with self._arena.open("r+b") as file:
            arena = memoryview(mmap.mmap(file.fileno(), self._num_bytes))
        try:
            return DiskTier(disk.folder, disk.num_bytes, self._copies, arena, disk.segment_bytes)
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise ConfigError(f"kv_disk_path: cannot use {disk.folder}: {error.strerror or error}") from None

    async def stop(self) -> None:
        """End the server, and remove the arena."""
        if self._server is not None:
            await self._server.stop(grace=None)
        if self._disk is not None:
            await self._disk.stop()
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
                self._copies.abandon(copy)
            for pinned in user.pins.values():
                self._unpin(pinned)

    async def _answer(self, user: _User, request: store_pb2.StoreRequest) -> store_pb2.StoreResponse:
        match request.WhichOneof("request"):
            case "open":
                user.space = request.open.space.encode() + b"\0"
                arena = store_pb2.Arena(path=str(self._arena), size=self._num_bytes)
                return store_pb2.StoreResponse(arena=arena)
            case "reserve":
                return store_pb2.StoreResponse(reserved=self._reserve(user, request.reserve))
            case "complete":
                return store_pb2.StoreResponse(completed=self._complete(user, request.complete))
            case "pin":
                return store_pb2.StoreResponse(pinned=await self._pin(user, request.pin))
            case "unpin":
                pinned = user.pins.pop(request.unpin.pin, [])
                damaged = {key for part in request.unpin.damaged for key in _keys(user, part.group, part.keys)}
                self._copies.counters["damaged"] += self._copies.drop(c for c in pinned if c.key in damaged)
                self._unpin(pinned)
                return store_pb2.StoreResponse(unpinned=store_pb2.Unpinned())
            case "release":
                num_dropped = await self._release(request.release.session_id)
                return store_pb2.StoreResponse(released=store_pb2.Released(copies=num_dropped))
            case "owners":
                owners = self._copies.owners()
                if self._disk is not None:
                    owners = sorted({*owners, *await self._disk.owners()} - {NOBODY})
                return store_pb2.StoreResponse(owners=store_pb2.Owners(session_ids=owners))
            case _:
                return store_pb2.StoreResponse(stats=self._stats())

    def _reserve(self, user: _User, request: store_pb2.ReserveCopies) -> store_pb2.Reserved:
        offsets = []
        for key, owner in zip(_keys(user, request.group, request.keys), request.session_ids, strict=True):
            copy = self._copies.reserve(key, request.page_bytes, owner)
            if copy is not None:
                user.reserved[key] = copy
            offsets.append(copy.offset if copy is not None else NOT_THERE)
        return store_pb2.Reserved(offsets=offsets)

    def _complete(self, user: _User, request: store_pb2.CompleteCopies) -> store_pb2.Completed:
        num_complete = 0
        keys = _keys(user, request.group, request.keys)
        for key, crc, written in zip(keys, request.crcs, request.written, strict=True):
            copy = user.reserved.pop(key)
            if written:
                self._copies.complete(copy, crc)
                num_complete += 1
                if self._disk is not None:
                    self._disk.add(copy)
            else:
                self._copies.abandon(copy)
        return store_pb2.Completed(copies=num_complete)

    async def _release(self, session: str) -> int:
        num_dropped = self._copies.release(session) if session else self._copies.flush()
        if self._disk is not None:
            await (self._disk.release(session) if session else self._disk.flush())
        return num_dropped

    async def _pin(self, user: _User, request: store_pb2.PinCopies) -> store_pb2.Pinned:
        if self._disk is not None:
            for part in request.groups:
                await self._disk.bring(_keys(user, part.group, part.keys), request.session_id)
        owner, groups = request.session_id, []
        pinned: list[Copy] = []
        for part in request.groups:
            found = [self._copies.pin(key, owner) for key in _keys(user, part.group, part.keys)]
            pinned += [copy for copy in found if copy is not None]
            offsets = [copy.offset if copy is not None else NOT_THERE for copy in found]
            crcs = [copy.crc or 0 if copy is not None else 0 for copy in found]
            groups.append(store_pb2.PlacesOfGroup(offsets=offsets, crcs=crcs))
        number = next(self._numbers)
        user.pins[number] = pinned
        return store_pb2.Pinned(pin=number, groups=groups)

    def _unpin(self, pinned: Sequence[Copy]) -> None:
        for copy in pinned:
            self._copies.unpin(copy)

    def _stats(self) -> store_pb2.StoreStats:
        index, disk = self._copies, self._disk
        return store_pb2.StoreStats(
            bytes_total=self._num_bytes,
            bytes_used=index.num_bytes_used,
            copies=len(index),
            counters=index.counters + disk.counters if disk is not None else index.counters,
            disk_bytes_used=disk.num_bytes_used if disk is not None else 0,
        )


def _keys(user: _User, group: int, packed: bytes) -> list[bytes]:
    prefix = user.space + bytes([group])
    return [prefix + packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]
