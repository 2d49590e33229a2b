"""One rank's traffic with its node's KV store: filled pages go there in the background, wanted ones come back."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import compress
from typing import Any

import numpy as np
import torch
from zlib_ng.zlib_ng import crc32

from holdfast.v1 import rank_pb2, store_pb2
from workers.config import EngineConfig
from workers.engine.migration import Columns, write_pages
from workers.kv.page_events import FilledPage
from workers.kv.prefix import DIGEST_BYTES
from workers.models.parallel import Shard
from workers.serving.kv_transfer import RankThread
from workers.serving.results import result_of
from workers.store.client import StoreClient, StoreUnavailable
from workers.store.copies import nobody_of

log = logging.getLogger("holdfast.store")
LOAD_BYTES = 4 * 1024 * 1024
"""Written at a time, between two steps or beside one: a millisecond or less."""
NUM_BUFFERS, PER_LOAD = 16, 2
"""Of ``LOAD_BYTES`` at most, for a rank that must write pages itself. As many loads as there are between two steps are
written there; of one load a chunk is read while another is written, as more would not stay in the processor's caches.
"""
COPY_BYTES = 8 * 1024 * 1024
"""Copied at a time: the two messages with the store that it takes cost as much as copying 2 MB."""
GATHER_S = 0.25
"""Between two looks at what was filled: a request for each page would cost more than the copying."""
STATS_S, NO_STATS_S = 2.0, 0.2
"""From one look at the store's figures to the next, while it answers and while it does not."""
MAX_WAITING = 8192
"""Pages that wait to be copied. When more fill, those that waited longest are not copied: a copy is never owed."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    filled: FilledPage
    num_drops: int


@dataclass(frozen=True, slots=True)
class _Found:
    """A copy in the arena, of a column of a session's page table."""

    column: int
    offset: int
    crc: int
    key: bytes


def space_of(layout: str, shard: Shard, config: EngineConfig) -> str:
    """What a page's KV depends on besides its tokens: a copy may be found by another cluster, on the same disk."""
    computed = (config.device, config.dtype, config.quantization, config.attention_backend, version("holdfast"))
    return f"{layout}, rank {shard.rank} of {shard.size}, {', '.join(map(str, computed))}"


class PageCopies:
    """Copies of one rank's pages. Lives in the rank's event loop; pages are copied in a thread of its own."""

    def __init__(self, owner: RankThread, config: EngineConfig) -> None:
        assert config.kv_store is not None
        self._owner, rank = owner, owner.rank
        self._events, self._loop = rank.watch_pages(self._note), asyncio.get_running_loop()
        self.client = StoreClient(config.kv_store, space_of(rank.layout, rank.shard, config))
        self._bytes_per_s = config.kv_store_write_mb_per_s * 1e6
        self._noted: deque[tuple[Sequence[tuple[FilledPage, int]], list[store_pb2.ReleaseCopies]]] = deque()
        self._waiting: deque[_Waiting] = deque(maxlen=MAX_WAITING)
        self._released: deque[store_pb2.ReleaseCopies] = deque(maxlen=MAX_WAITING)
        self._num_copying = 0
        self._gone: OrderedDict[str, None] = OrderedDict()
        """Sessions that were released of late. A page of theirs that the index still has is another one's too."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-copies")
        # The one that was used last comes first. Fresh memory takes longer to be handed out than to be copied into.
        self._buffers = asyncio.LifoQueue[bytearray]()
        for _ in range(NUM_BUFFERS):
            self._buffers.put_nowait(bytearray())  # as large as its first load needs
        self._scratch = bytearray()
        """What the thread of copies reads before it writes."""
        self.counters: Counter[str] = Counter()
        self.stats = store_pb2.StoreStats()
        """The store's, a while ago; while it does not answer, only where its copies are too."""
        self._tasks = [self._loop.create_task(self._write()), self._loop.create_task(self._measure())]

    async def stop(self) -> None:
        self._owner.rank.watch_pages(None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.stop()
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def num_waiting(self) -> int:
        """Pages to be copied, and those that are being copied."""
        return len(self._noted) + len(self._waiting) + self._num_copying

    async def owners(self) -> list[str] | None:
        """The sessions that the store has copies for; None if it does not answer."""
        try:
            return list((await self.client.ask(owners=store_pb2.OwnersRequest())).session_ids)
        except StoreUnavailable:
            return None

    async def _measure(self) -> None:
        while True:
            try:
                self.stats, pause_s = await self.client.ask(stats=store_pb2.StoreStatsRequest()), STATS_S
            except StoreUnavailable:
                self.stats, pause_s = store_pb2.StoreStats(replicas=self.stats.replicas), NO_STATS_S
            await asyncio.sleep(pause_s)

    # ---- to the store --------------------------------------------------------------------------------

    def _note(
        self, filled: Sequence[tuple[FilledPage, int]], released: Sequence[str], flushed: Sequence[str | None]
    ) -> None:
        """In the thread that computes: these pages are computed, and of these sessions and tenants no copy may stay.

        Wakes nobody: for the thread that computes, that is a wait for the GIL.
        """
        releases = [store_pb2.ReleaseCopies(session_id=session) for session in released]
        self._noted.append((filled, [*releases, *(store_pb2.ReleaseCopies(tenant=each or "") for each in flushed)]))

    def _take_notes(self) -> None:
        while self._noted:
            filled, released = self._noted.popleft()
            self._released.extend(released)
            self._gone.update(dict.fromkeys(release.session_id for release in released if release.session_id))
            self.counters["kv_copies_skipped"] += max(0, len(self._waiting) + len(filled) - MAX_WAITING)
            self._waiting.extend(_Waiting(*each) for each in filled)
        while len(self._gone) > MAX_WAITING:
            self._gone.popitem(last=False)

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(GATHER_S)
            self._take_notes()
            try:
                while self._released:
                    await self.client.ask(release=self._released[0])
                    self._released.popleft()
                while self._waiting:
                    num_bytes = await self._write_some(self._take_some())
                    # A share of the time: what computes wants the memory's bandwidth too.
                    await asyncio.sleep(num_bytes / self._bytes_per_s)
            except StoreUnavailable:
                # No copy is owed. A release is: the store may only have been out of reach.
                self.counters["kv_copies_skipped"] += len(self._waiting)
                self._waiting.clear()
            self._num_copying = 0

    def _take_some(self) -> list[_Waiting]:
        """The next pages of one group."""
        group, some = self._waiting[0].filled.group, dict[bytes, _Waiting]()
        per_chunk = max(1, COPY_BYTES // self._owner.rank.kv.page_bytes[group])
        while self._waiting and len(some) < per_chunk and self._waiting[0].filled.group == group:
            waiting = self._waiting.popleft()
            some[waiting.filled.digest] = waiting
        self._num_copying = len(some)
        return list(some.values())

    async def _write_some(self, some: list[_Waiting]) -> int:
        """Copy pages of one group. Returns the bytes."""
        group = some[0].filled.group
        size = self._owner.rank.kv.page_bytes[group]
        reserve = store_pb2.ReserveCopies(
            group=group,
            keys=b"".join(waiting.filled.digest for waiting in some),
            page_bytes=size,
            session_ids=[nobody_of(w.filled.owner) if w.filled.owner in self._gone else w.filled.owner for w in some],
        )
        offsets = (await self.client.ask(reserve=reserve)).offsets
        wanted = [(waiting, offset) for waiting, offset in zip(some, offsets, strict=True) if offset >= 0]
        if not wanted:
            return 0
        arena = self.client.arena
        if arena is None:
            raise StoreUnavailable("the node's KV store is gone")
        crcs = await self._loop.run_in_executor(self._thread, self._copy, arena, wanted)
        complete = store_pb2.CompleteCopies(
            group=group,
            keys=b"".join(waiting.filled.digest for waiting, _ in wanted),
            crcs=[crc or 0 for crc in crcs],
            written=[crc is not None for crc in crcs],
        )
        await self.client.ask(complete=complete)
        num_written = sum(crc is not None for crc in crcs)
        self.counters["kv_pages_copied"] += num_written
        return num_written * size

    @torch.inference_mode()
    def _copy(self, arena: memoryview, wanted: Sequence[tuple[_Waiting, int]]) -> list[int | None]:
        """Write pages to their places in the arena. Returns their checksums; None: its KV is gone meanwhile."""
        kv, group = self._owner.rank.kv, wanted[0][0].filled.group
        targets = [arena[offset : offset + kv.page_bytes[group]] for _, offset in wanted]
        kv.read_pages_into(group, [waiting.filled.page for waiting, _ in wanted], targets)
        # Asked after the pages were read: whoever may write one has had it dropped before.
        unchanged = [self._events.is_unchanged(waiting.filled, waiting.num_drops) for waiting, _ in wanted]
        return [crc32(target) if same else None for target, same in zip(targets, unchanged, strict=True)]

    # ---- from the store ------------------------------------------------------------------------------

    async def load(self, request: rank_pb2.FetchRequest, columns: Columns) -> tuple[int, Columns]:
        """Read a session's pages into those that the log allocated for it.

        Returns the bytes, and the columns of which there is no copy, or a damaged one. If the request names nobody
        else who has them, nothing is read where a copy is not there. Raises StoreUnavailable, or MigrationRefused
        if a turn or a release came first.
        """
        parts = [store_pb2.KeysOfGroup(group=group, keys=keys) for group, keys in enumerate(request.keys)]
        pinned = await self._pin_all(request, parts)
        arena, damaged, num_bytes = self.client.arena, list[store_pb2.KeysOfGroup](), 0
        if arena is None or not (request.address or _has_all(pinned)):
            self.client.unpin(pinned.pin)
            return 0, columns
        missing = Columns()
        try:
            for part, places, wanted in zip(parts, pinned.groups, columns, strict=True):
                found = [
                    _Found(column, offset, crc, part.keys[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES])
                    for i, (column, offset, crc) in enumerate(zip(wanted, places.offsets, places.crcs, strict=False))
                    if offset >= 0
                ]
                bad = await self._load_group(request, part.group, arena, found)
                if bad:
                    damaged.append(store_pb2.KeysOfGroup(group=part.group, keys=b"".join(each.key for each in bad)))
                loaded = {each.column for each in found} - {each.column for each in bad}
                num_bytes += len(loaded) * self._owner.rank.kv.page_bytes[part.group]
                self.counters["kv_pages_not_sent"] += len(loaded) if request.address else 0
                missing.append([column for column in wanted if column not in loaded])
        finally:
            self.client.unpin(pinned.pin, damaged)
        return num_bytes, missing

    async def _pin_all(
        self, request: rank_pb2.FetchRequest, parts: Sequence[store_pb2.KeysOfGroup]
    ) -> store_pb2.Pinned:
        """Pin copies. Those that are not in memory are brought there first."""
        pin = store_pb2.PinCopies(groups=parts, session_id=request.session_id)
        pinned: store_pb2.Pinned = await self.client.ask(pin=pin)
        if _has_all(pinned):
            return pinned
        self.client.unpin(pinned.pin)
        wanted = store_pb2.WantedCopies(groups=parts, session_id=request.session_id, nodes=request.kv_nodes)
        await self.client.bring(wanted, request.timeout_s)
        pinned = await self.client.ask(pin=pin)
        return pinned

    async def _load_group(
        self, request: rank_pb2.FetchRequest, group: int, arena: memoryview, found: Sequence[_Found]
    ) -> list[_Found]:
        """Write copies to their columns. Returns those that are damaged."""
        per_chunk = max(1, LOAD_BYTES // self._owner.rank.kv.page_bytes[group])
        chunks = [found[first : first + per_chunk] for first in range(0, len(found), per_chunk)]
        places = asyncio.Semaphore(PER_LOAD)
        try:
            async with asyncio.TaskGroup() as tasks:
                loads = [tasks.create_task(self._load_chunk(request, group, arena, each, places)) for each in chunks]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        damaged = [each for load in loads for each in load.result()]
        self.counters["kv_copies_damaged"] += len(damaged)
        return damaged

    async def _load_chunk(
        self,
        request: rank_pb2.FetchRequest,
        group: int,
        arena: memoryview,
        found: Sequence[_Found],
        places: asyncio.Semaphore,
    ) -> list[_Found]:
        """See ``_load_group``."""
        rank = self._owner.rank
        size = rank.kv.page_bytes[group]
        async with places:
            if rank.writes_at_once:
                return await result_of(self._thread.submit(self._load_here, request, group, arena, found))
            buffer = await self._buffers.get()
            if len(buffer) < len(found) * size:
                buffer = bytearray(len(found) * size)
            looked = self._thread.submit(_look, arena, found, size, buffer)
            done: Future[Any] = looked
            try:
                right, data, damaged = await result_of(looked)
                if right:
                    columns = [each.column for each in right]
                    done = self._owner.call(partial(write_pages, rank, request, group, columns, data))
                    await result_of(done)
            finally:
                self._reuse_after(done, buffer)
        return damaged

    @torch.inference_mode()
    def _load_here(
        self, request: rank_pb2.FetchRequest, group: int, arena: memoryview, found: Sequence[_Found]
    ) -> list[_Found]:
        """Write copies to their columns beside a step, in the thread of copies. Returns those that are damaged."""
        rank = self._owner.rank
        size = rank.kv.page_bytes[group]
        if len(self._scratch) < len(found) * size:
            self._scratch = bytearray(len(found) * size)
        right, data, damaged = _look(arena, found, size, self._scratch)
        if right:
            with rank.cache_lock:
                write_pages(rank, request, group, [each.column for each in right], data)
        return damaged

    def _reuse_after(self, done: Future[Any], buffer: bytearray) -> None:
        """Not before the thread has done with it, even if nobody waits any longer."""
        done.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._buffers.put_nowait, buffer))


def _has_all(pinned: store_pb2.Pinned) -> bool:
    return all(offset >= 0 for places in pinned.groups for offset in places.offsets)


def _look(
    arena: memoryview, found: Sequence[_Found], size: int, buffer: bytearray
) -> tuple[list[_Found], memoryview, list[_Found]]:
    """Copies that match their checksums, what is in them, in ``buffer``, and those that do not.

    What was checked is what is used: it is read once.
    """
    whole = memoryview(buffer)[: len(found) * size]
    source, target = np.frombuffer(arena, np.uint8), np.frombuffer(whole, np.uint8)
    parts = [slice(i * size, (i + 1) * size) for i in range(len(found))]
    for each, part in zip(found, parts, strict=True):
        target[part] = source[each.offset : each.offset + size]  # not as memoryviews, which would hold the GIL
    matches = [crc32(whole[part]) == each.crc for each, part in zip(found, parts, strict=True)]
    if all(matches):
        return list(found), whole, []
    right = b"".join(whole[part] for part, is_right in zip(parts, matches, strict=True) if is_right)
    return list(compress(found, matches)), memoryview(right), [f for f, m in zip(found, matches, strict=True) if not m]
