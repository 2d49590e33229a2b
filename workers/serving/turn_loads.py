"""Loads of KV that turns wait for: the leader's part. Each rank reads its own shard (``page_copies``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from array import array
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.tokens import pack_tokens
from holdfast.v1 import rank_pb2, store_pb2
from workers.engine.admission import MIN_LOAD_TOKENS, Wanted, wanted_by
from workers.engine.leader import Leader
from workers.engine.messages import Submission
from workers.engine.migration import ExportedKV, PendingImport
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
AT_ONCE = 4096
"""Tokens whose digests are made in the event loop: in half a millisecond. To have a thread do it costs some 0.2 ms."""
NAMES: dict[int, str] = {store_pb2.TIER_MEMORY: "memory", store_pb2.TIER_DISK: "disk", store_pb2.TIER_PEER: "peers"}


@dataclass(frozen=True, slots=True)
class _Found:
    """What to load of a history, and the digests of all its pages."""

    plan: LoadPlan | None
    digests: list[bytes]


@dataclass(frozen=True, slots=True)
class _Look:
    """What is there of these tokens."""

    tokens: array[int]
    found: Future[_Found]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A load whose pages are being allocated."""

    plan: LoadPlan
    digests: list[bytes]
    transfer_id: str
    pending: Future[PendingImport]


class TurnLoads:
    """Loads into one worker's sessions. In the worker's event loop.

    Beside a batch, each command to the leader's thread waits for the end of a step. A load takes two: one admits the
    turn's submission and begins the load, the next commits its pages and queues the turn.
    """

    def __init__(self, leader: Leader, links: RankLinks, copies: PageCopies) -> None:
        self._leader, self._links, self._copies = leader, links, copies
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks: dict[int, _Look] = {}
        """By ``id`` of the tokens, for turns that the leader's thread has not come to yet: one may come twice."""
        self._bandwidths = {tier: Bandwidth(leader) for tier in NAMES}
        self.counters: Counter[str] = Counter()
        leader.admission.load = self.load

    def submit(self, submission: Submission) -> None:
        """``Leader.submit``. A whole history is looked for at once: the leader's thread may compute a step first."""
        if submission.prefix_len or submission.ephemeral or len(submission.tokens) < MIN_LOAD_TOKENS:
            self._leader.submit(submission)
            return
        tokens = submission.tokens
        look = self._looks[id(tokens)] = _Look(tokens, Future())
        self._start(self._look(wanted_by(submission, tokens), look.found))
        self._leader.submit(submission)
        self._leader.call(partial(self._looks.pop, id(tokens)))

    def load(self, wanted: Wanted) -> Future[None]:
        """See ``Admission.load``. Called in the leader's thread."""
        done: Future[None] = Future()
        look = self._looks.get(id(wanted.tokens)) if not wanted.known_len else None
        found = look.found if look is not None else None
        is_found = found is not None and found.done() and not found.cancelled() and found.exception() is None
        begun = self._begin(wanted, found.result()) if found is not None and is_found else None
        self._loop.call_soon_threadsafe(lambda: self._start(self._load(wanted, found, begun, done)))
        return done

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, wanted: Wanted, found: Future[_Found]) -> None:
        try:
            found.set_result(await self._find(wanted))
        except HoldfastError as error:
            found.set_exception(error)
        finally:
            found.cancel()  # if nothing else

    async def _load(
        self, wanted: Wanted, found: Future[_Found] | None, begun: _Begun | None, done: Future[None]
    ) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if begun is None:
                    begun = self._begin(wanted, await (result_of(found) if found is not None else self._find(wanted)))
                if begun is not None:
                    with self._bandwidths[begun.plan.slowest].time.transfer() as charged_s:
                        num_bytes = await self._load_into(wanted, begun, done)
                        measure(begun.plan, num_bytes, charged_s(), self._bandwidths)
        except (HoldfastError, TimeoutError) as error:
            self.counters["kv_loads_failed"] += 1
            what = {"session_id": wanted.session_id}
            reason = error or "it took too long"
            log.info("KV of session %s is computed, not loaded: %s", wanted.session_id, reason, extra=what)
        except Exception:
            log.exception("KV of session %s is computed, not loaded", wanted.session_id)
        finally:
            _resolve(done)

    async def _find(self, wanted: Wanted) -> _Found:
        # The last token is always computed: its logits start the output.
        return _Found(*await self._plan(wanted, wanted.tokens[:-1]))

    def _begin(self, wanted: Wanted, found: _Found) -> _Begun | None:
        """None: it does not pay. From any thread."""
        plan = found.plan
        if plan is None or plan.reached - wanted.known_len < MIN_LOAD_TOKENS:
            return None
        begins_at = wanted.known_len // self._leader.cache.page_size * self._leader.cache.page_size
        tokens = wanted.tokens[: plan.reached]
        stored = ExportedKV(wanted.tenant, wanted.scope, tokens, plan.reached, (), plan.columns, begins_at)
        transfer_id = f"load/{uuid.uuid4().hex}"
        pending = self._leader.migrations.begin_load(wanted.session_id, wanted.epoch, transfer_id, stored)
        return _Begun(plan, found.digests, transfer_id, pending)

    async def _plan(self, wanted: Wanted, tokens: array[int]) -> tuple[LoadPlan | None, list[bytes]]:
        """What to load, and the digests of all pages. To load nothing, or a part, may be the fastest."""
        cache, rank = self._leader.cache, self._leader.rank
        first = wanted.known_len // cache.page_size
        make = partial(page_digests, wanted.scope.name, tokens, cache.page_size)
        digests = make() if len(tokens) <= AT_ONCE else await asyncio.to_thread(make)
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

    async def _load_into(self, wanted: Wanted, begun: _Begun, done: Future[None]) -> int:
        """Returns the bytes that came."""
        migrations, session_id, digests = self._leader.migrations, wanted.session_id, begun.digests
        try:
            pending = await result_of(begun.pending)
            request = rank_pb2.FetchRequest(
                session_id=session_id,
                transfer_id=begun.transfer_id,
                columns=[pack_tokens(array("i", part)) for part in pending.columns],
                keys=[b"".join(digests[column] for column in part) for part in pending.columns],
                timeout_s=TIMEOUT_S,
                kv_nodes=wanted.kv_nodes,
            )
            followers = [self._links.fetch(rank, request) for rank in range(1, self._leader.rank.shard.size)]
            num_bytes = sum(await asyncio.gather(fetch(self._leader, self._copies, request), *followers))
            completed = migrations.complete_load(session_id, begun.transfer_id)
            # In the leader's thread, which so admits the turn between the same two steps.
            completed.add_done_callback(lambda _: _resolve(done))
            reached = await result_of(completed)
        except BaseException:
            migrations.cancel_import(session_id, begun.transfer_id)
            raise
        self.counters["kv_loads"] += 1
        self.counters["kv_tokens_loaded"] += reached - pending.cached_len
        for tier, num_pages in begun.plan.pages.items():
            self.counters[f"kv_pages_from_{NAMES[tier]}"] += num_pages
        return num_bytes


def _resolve(done: Future[None]) -> None:
    with contextlib.suppress(InvalidStateError):
        done.set_result(None)
