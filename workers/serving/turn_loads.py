"""Loads of KV that turns wait for: the leader's part. Each rank reads its own shard (``page_copies``)."""

from __future__ import annotations

import asyncio
import logging
import uuid
from array import array
from collections import Counter
from concurrent.futures import Future
from functools import partial

from holdfast.errors import HoldfastError
from holdfast.tokens import pack_tokens
from holdfast.v1 import rank_pb2, store_pb2
from workers.engine.admission import MIN_LOAD_TOKENS, Wanted
from workers.engine.leader import Leader
from workers.engine.migration import ExportedKV
from workers.kv.prefix import page_digests
from workers.serving.bandwidth import REMEASURE_EVERY, Bandwidth
from workers.serving.load_plan import LoadPlan, load_plans, measure, seconds_until_there
from workers.serving.page_copies import PageCopies
from workers.serving.page_fetch import fetch
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
            what = {"session_id": wanted.session_id}
            reason = error or "it took too long"
            log.info("KV of session %s is computed, not loaded: %s", wanted.session_id, reason, extra=what)
        except Exception:
            log.exception("KV of session %s is computed, not loaded", wanted.session_id)
        finally:
            done.set_result(None)

    async def _find_and_load(self, wanted: Wanted) -> None:
        # The last token is always computed: its logits start the output.
        plan, digests = await self._plan(wanted, wanted.tokens[:-1])
        if plan is not None and plan.reached - wanted.known_len >= MIN_LOAD_TOKENS:
            tokens, size = wanted.tokens[: plan.reached], self._leader.cache.page_size
            begins_at = wanted.known_len // size * size
            stored = ExportedKV(wanted.tenant, wanted.scope, tokens, plan.reached, (), plan.columns, begins_at)
            with self._bandwidths[plan.slowest].time.transfer() as charged_s:
                num_bytes = await self._load_into(wanted, plan, stored, digests)
                measure(plan, num_bytes, charged_s(), self._bandwidths)

    async def _plan(self, wanted: Wanted, tokens: array[int]) -> tuple[LoadPlan | None, list[bytes]]:
        """What to load, and the digests of all pages. To load nothing, or a part, may be the fastest."""
        cache, rank = self._leader.cache, self._leader.rank
        first = wanted.known_len // cache.page_size
        digests = await asyncio.to_thread(page_digests, wanted.scope.name, tokens, cache.page_size)
        keys = b"".join(digests[first:])
        groups = [store_pb2.KeysOfGroup(group=group.index, keys=keys) for group in cache.groups]
        tiers = await self._copies.client.find(store_pb2.WantedCopies(groups=groups, nodes=wanted.kv_nodes))
        page_bytes = [size * rank.shard.size for size in rank.kv.page_bytes]
        plans = list(load_plans(cache.groups, tiers, first, cache.page_size, page_bytes))
        longest = max(plans, key=lambda plan: plan.reached, default=None)
        speed = self._leader.pace.prefill_tokens_per_s
        if longest is None or not speed:
            return longest, digests
        cost = partial(
            seconds_until_there,
            known_len=wanted.known_len,
            length=len(tokens),
            bandwidths=self._bandwidths,
            tokens_per_s=speed,
        )
        best = min((longest, *plans, None), key=cost)
        if best is not longest:
            self.counters["kv_loads_cut"] += 1
            if not self.counters["kv_loads_cut"] % REMEASURE_EVERY:
                best = longest
        return best, digests

    async def _load_into(self, wanted: Wanted, plan: LoadPlan, stored: ExportedKV, digests: list[bytes]) -> int:
        """Returns the bytes that came."""
        migrations, session_id = self._leader.migrations, wanted.session_id
        transfer_id = f"load/{uuid.uuid4().hex}"
        begun = migrations.begin_load(session_id, wanted.epoch, transfer_id, stored)
        try:
            pending = await result_of(begun)
            request = rank_pb2.FetchRequest(
                session_id=session_id,
                transfer_id=transfer_id,
                columns=[pack_tokens(array("i", part)) for part in pending.columns],
                keys=[b"".join(digests[column] for column in part) for part in pending.columns],
                timeout_s=TIMEOUT_S,
                kv_nodes=wanted.kv_nodes,
            )
            followers = [self._links.fetch(rank, request) for rank in range(1, self._leader.rank.shard.size)]
            num_bytes = sum(await asyncio.gather(fetch(self._leader, self._copies, request), *followers))
            reached = await result_of(migrations.complete_import(session_id, transfer_id))
        except BaseException:
            migrations.cancel_import(session_id, transfer_id)
            raise
        self.counters["kv_loads"] += 1
        self.counters["kv_tokens_loaded"] += reached - pending.cached_len
        for tier, num_pages in plan.pages.items():
            self.counters[f"kv_pages_from_{NAMES[tier]}"] += num_pages
        return num_bytes
