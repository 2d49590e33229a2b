"""A store's end for the stores of other nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

import grpc
from zlib_ng.zlib_ng import crc32

from holdfast.errors import InvalidRequest
from holdfast.v1 import store_pb2, store_pb2_grpc
from holdfast.wire import sends_errors
from workers.store.contents import Contents
from workers.store.copies import Copy, nobody_of

KEY_BYTES = 16
"""Of a page; a space and a group are before it."""
MESSAGE_BYTES = 2 * 1024 * 1024
"""Of copies in one message: the event loop handles one in a few milliseconds."""
FETCHED_TOGETHER = 256
"""Copies that are held while they are sent."""


class PeerServer(store_pb2_grpc.KVStorePeerServiceServicer):
    """Serves one store's contents, and takes copies of others'."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    async def Find(self, request: store_pb2.PeerKeys, context: grpc.aio.ServicerContext) -> store_pb2.FoundCopies:
        return store_pb2.FoundCopies(tiers=[bytes(self._contents.tiers(keys_of(part))) for part in request.parts])

    @sends_errors
    async def Put(self, request: store_pb2.PeerCopies, context: grpc.aio.ServicerContext) -> store_pb2.PutCopies:
        return store_pb2.PutCopies(copies=len(take(self._contents, request, is_replica=True)))

    async def Fetch(
        self, request: store_pb2.PeerKeys, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[store_pb2.PeerCopies]:
        for part in request.parts:
            keys = keys_of(part)
            for first in range(0, len(keys), FETCHED_TOGETHER):
                some = keys[first : first + FETCHED_TOGETHER]
                await self._contents.bring(some, request.session_id)
                found = [self._contents.copies.pin(key, request.session_id) for key in some]
                pinned = [copy for copy in found if copy is not None]
                try:
                    for copies in in_messages(pinned):
                        yield message_of(self._contents, copies)
                finally:
                    for copy in pinned:
                        self._contents.copies.unpin(copy)

    async def Release(self, request: store_pb2.ReleaseCopies, context: grpc.aio.ServicerContext) -> store_pb2.Released:
        return store_pb2.Released(copies=await self._contents.release(request))


def keys_of(part: store_pb2.KeysOfPrefix) -> list[bytes]:
    """Whole keys."""
    return [part.prefix + part.keys[at : at + KEY_BYTES] for at in range(0, len(part.keys), KEY_BYTES)]


def parts_of(keys: Sequence[bytes]) -> list[store_pb2.KeysOfPrefix]:
    """Keys as a message has them, in the same order."""
    parts: list[store_pb2.KeysOfPrefix] = []
    for key in keys:
        prefix = key[:-KEY_BYTES]
        if not parts or parts[-1].prefix != prefix:
            parts.append(store_pb2.KeysOfPrefix(prefix=prefix))
        parts[-1].keys += key[-KEY_BYTES:]
    return parts


def in_messages(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Divide copies into those of one message each: of one prefix and size, and not too many."""
    some: list[Copy] = []
    for copy in copies:
        if some and (
            (copy.num_bytes, copy.key[:-KEY_BYTES]) != (some[0].num_bytes, some[0].key[:-KEY_BYTES])
            or (len(some) + 1) * copy.num_bytes > MESSAGE_BYTES
        ):
            yield some
            some = []
        some.append(copy)
    if some:
        yield some


def message_of(contents: Contents, copies: Sequence[Copy]) -> store_pb2.PeerCopies:
    """Copies that are pinned or held, with their bytes. One that two sessions have used belongs to neither."""
    (part,) = parts_of([copy.key for copy in copies])
    return store_pb2.PeerCopies(
        keys=part,
        session_ids=[nobody_of(copy.owner) if copy.is_shared else copy.owner for copy in copies],
        crcs=[copy.crc or 0 for copy in copies],
        data=b"".join(contents.data(copy) for copy in copies),
    )


def take(contents: Contents, message: store_pb2.PeerCopies, *, is_replica: bool) -> list[Copy]:
    """Keep the copies of a message that match their checksums. Returns those that are new here.

    Raises InvalidRequest if it is no such message.
    """
    keys, data = keys_of(message.keys), memoryview(message.data)
    if not keys or len(data) % len(keys) or not len(keys) == len(message.session_ids) == len(message.crcs):
        raise InvalidRequest(f"{len(keys)} copies in {len(data)} bytes")
    size, taken = len(data) // len(keys), list[Copy]()
    for i, (key, owner, crc) in enumerate(zip(keys, message.session_ids, message.crcs, strict=True)):
        page = data[i * size : (i + 1) * size]
        if crc32(page) != crc:
            contents.copies.counters["damaged"] += 1
            continue
        copy = contents.put(key, owner, crc, page, is_replica=is_replica)
        if copy is not None:
            taken.append(copy)
    return taken
