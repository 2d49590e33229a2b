"""Loads of KV that turns wait for: the leader's part. Each rank reads its own shard (``page_copies``)."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from array import array
from collections import Counter
from concurrent.futures import Future

from holdfast.errors import HoldfastError
from holdfast.tokens import pack_tokens
from holdfast.v1 import rank_pb2, store_pb2
from workers.engine.admission import MIN_LOAD_TOKENS, Wanted
from workers.engine.leader import Leader
from workers.engine.migration import ExportedKV
from workers.kv.loadable import first_loaded, loadable_len
from workers.kv.prefix import page_digests
from workers.serving.bandwidth import Bandwidth
from workers.serving.page_copies import PageCopies
from workers.serving.rank_links import RankLinks
from workers.serving.results import result_of

log = logging.getLogger("holdfast.store")
TIMEOUT_S = 10.0
"""A turn that waits longer is computed."""
NAMES: dict[int, str] = {store_pb2.TIER_MEMORY: "memory", store_pb2.TIER_DISK: "disk", store_pb2.TIER_PEER: "peers"}


class TurnLoads:
    """Loads into one worker's sessions. In the worker's event loop."""

    def __init__(self, leader: Leader, links: RankLinks, copies: PageCopies) -> None:
        self._leader, self._links, self._copies = leader, links, copies
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._bandwidths = {tier: Bandwidth(leader) for tier in NAMES}
        """Of the slowest tier that a load needs."""
        self.counters: Counter[str] = Counter()
        leader.admission.load = self.load

    def load(self, wanted: Wanted) -> Future[None]:
        """See ``Admission.load``. Called in the leader's thread."""
        done: Future[None] = Future()

        def begin() -> None:
            task = self._loop.create_task(self._load(wanted, done))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)
        return done

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _load(self, wanted: Wanted, done: Future[None]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._find_and_load(wanted)
        except (HoldfastError, TimeoutError) as error:
            self.counters["kv_loads_failed"] += 1
            log.info("KV of session %s is computed, not loaded: %s", wanted.session_id, error or "it took too long")
        except Exception:
            log.exception("KV of session %s is computed, not loaded", wanted.session_id)
        finally:
            done.set_result(None)

    async def _find_and_load(self, wanted: Wanted) -> None:
        cache, client = self._leader.cache, self._copies.client
        size, groups = cache.page_size, cache.groups
        first = wanted.known_len // size
        # The last token is always computed: its logits start the output.
        digests = (await asyncio.to_thread(page_digests, wanted.tenant, wanted.tokens[:-1], size))[first:]
        keys = [store_pb2.KeysOfGroup(group=group.index, keys=b"".join(digests)) for group in groups]
        tiers = await client.find(store_pb2.WantedCopies(groups=keys, nodes=wanted.kv_nodes))
        reached = loadable_len(groups, tiers, first, size)
        if reached - wanted.known_len < MIN_LOAD_TOKENS:
            return
        columns = [list(range(max(first, first_loaded(g, reached, size)), reached // size)) for g in groups]
        found = Counter(part[column - first] for part, c in zip(tiers, columns, strict=True) for column in c)
        stored = ExportedKV(wanted.tenant, wanted.tokens[:reached], reached, (), columns)
        await self._load_into(wanted, stored, digests, first, self._bandwidths[max(found)])
        for tier, num_pages in found.items():
            self.counters[f"kv_pages_from_{NAMES[tier]}"] += num_pages

    async def _load_into(
        self, wanted: Wanted, stored: ExportedKV, digests: list[bytes], first: int, bandwidth: Bandwidth
    ) -> None:
        migrations, session_id = self._leader.migrations, wanted.session_id
        transfer_id, began = f"load/{uuid.uuid4().hex}", time.monotonic()
        begun = migrations.begin_load(session_id, wanted.epoch, transfer_id, stored)
        try:
            pending = await result_of(begun)
            bandwidth.refuse_slow(pending)
            request = rank_pb2.FetchRequest(
                session_id=session_id,
                transfer_id=transfer_id,
                columns=[pack_tokens(array("i", part)) for part in pending.columns],
                keys=[b"".join(digests[column - first] for column in part) for part in pending.columns],
                timeout_s=TIMEOUT_S,
                kv_nodes=wanted.kv_nodes,
            )
            followers = [self._links.fetch(rank, request) for rank in range(1, self._leader.rank.shard.size)]
            num_bytes = sum(await asyncio.gather(self._copies.load(request), *followers))
            reached = await result_of(migrations.complete_import(session_id, transfer_id))
        except BaseException:
            migrations.cancel_import(session_id, transfer_id)
            raise
        bandwidth.measured(num_bytes, time.monotonic() - began)
        self.counters["kv_loads"] += 1
        self.counters["kv_tokens_loaded"] += reached - pending.cached_len
