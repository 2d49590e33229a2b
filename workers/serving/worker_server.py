"""A worker's gRPC server: the routers' streams of turns, and the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import aclosing

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from holdfast import tls
from holdfast.deadlines import within
from holdfast.errors import HoldfastError, InvalidRequest, NoWorkerAvailable
from holdfast.v1 import kv_pb2_grpc, session_pb2, worker_pb2, worker_pb2_grpc
from holdfast.wire import abort_with, sends_errors
from workers.config import EngineConfig
from workers.engine.collectives import Collectives
from workers.engine.leader import Leader
from workers.engine.messages import TurnUpdate
from workers.engine.rank import Rank
from workers.scheduling import Finish
from workers.serving.importer import Importer
from workers.serving.kv_transfer import KVServer, export_session
from workers.serving.messages import submission_of, update_message
from workers.serving.metrics_server import MetricsServer
from workers.serving.page_copies import PageCopies
from workers.serving.rank_links import RankLinks
from workers.serving.results import result_of
from workers.serving.turn_loads import TurnLoads

log = logging.getLogger("holdfast.worker")
BEAT_INTERVAL_S = 0.25
"""Several beats a router's lease (2 s), so that a late one does not end the worker."""
DRAIN_POLL_S = 0.02
STOP_DELAY_S = 0.05
"""Lets the answer reach the caller before the process ends."""
MAX_ANSWERS = 1024
"""Control-plane answers that are kept for retries."""
SERVICE = "holdfast.v1.WorkerService"


class WorkerServer(worker_pb2_grpc.WorkerServiceServicer):
    """One worker's server. Runs in an asyncio loop; the engine has a thread of its own.

    ``group``: the worker's ranks, if there are several. ``on_lost`` is called with a reason, from any
    thread, when the worker must end.
    """

    def __init__(
        self,
        worker_id: str,
        incarnation: int,
        config: EngineConfig,
        on_lost: Callable[[str], None],
        *,
        node: str = "",
        group: Collectives | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._group = group
        self._node = node
        self._on_lost = on_lost
        self._links = RankLinks(config.rank_lease_s, on_lost)
        self._leader: Leader
        self._answers: OrderedDict[tuple[str, str, int, str], Future[worker_pb2.ControlResponse]] = OrderedDict()
        self._stream_of: dict[str, asyncio.Queue[worker_pb2.WorkerMessage]] = {}
        self._draining = False
        self._beat_interval_s = BEAT_INTERVAL_S
        self._copies: PageCopies | None = None
        self._loads: TurnLoads | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def rank(self) -> Rank:
        """The leader's, after ``start``."""
        return self._leader.rank

    async def start(
        self, host: str, followers: Callable[[], dict[int, str]] = dict, lifelines: Callable[[], list[str]] = list
    ) -> str:
        """Load the model and serve on a free port of ``host``; returns the address.

        ``followers`` returns the other ranks' addresses, and ``lifelines`` those of the lifelines that there are;
        they may block until the ranks are ready.
        """
        self._leader = await asyncio.to_thread(self._load)
        if self._config.kv_store is not None:
            self._copies = PageCopies(self._leader, self._config)
            self._loads = TurnLoads(self._leader, self._links, self._copies)
        self._importer = Importer(self._leader, self._links, self._copies)
        addresses, self._lifelines = await asyncio.to_thread(followers), await asyncio.to_thread(lifelines)
        timeout_s = self._config.collective_timeout_s
        await self._links.connect(addresses, self._leader.log, self._leader.cache.digest(), timeout_s)
        server = tls.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)
        kv_pb2_grpc.add_KVServiceServicer_to_server(KVServer(self._leader), server)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection(names, server)
        port = tls.listen(server, f"{host}:0")
        self._metrics = MetricsServer(host, self._stats)
        self._leader.start()
        await server.start()
        await checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        self._server = server
        self._addresses = [f"{host}:{port}", *self._links.addresses]
        return self._addresses[0]

    def _load(self) -> Leader:
        return Leader(
            self._config,
            self._emit,
            lambda error: self._on_lost(f"the engine failed: {error!r}"),
            incarnation=self.incarnation,
            group=self._group,
            send=self._links.send,
        )

    def expect_end(self) -> None:
        """The other ranks are about to stop: do not treat that as a failure."""
        self._links.expect_end()

    async def stop(self) -> None:
        if self._server is not None:
            # Side by side: each waits a while for its threads.
            await asyncio.gather(self._server.stop(grace=0.2), asyncio.to_thread(self._metrics.stop))
        if self._copies is not None and self._loads is not None:
            await self._loads.stop()
            await self._copies.stop()
        await asyncio.to_thread(self._leader.stop)
        await self._links.stop()

    # ---- turns ------------------------------------------------------------------------------------

    async def Attach(
        self, requests: AsyncIterator[worker_pb2.RouterMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        outbox: asyncio.Queue[worker_pb2.WorkerMessage] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            yield worker_pb2.WorkerMessage(welcome=self._welcome())
            beat_at = self._loop.time() + self._beat_interval_s
            while not reader.done():
                wait_s, message = beat_at - self._loop.time(), None
                if wait_s > 0:  # a beat that is due is sent first, even if the outbox is never empty
                    with contextlib.suppress(TimeoutError):
                        message = await within(wait_s, outbox.get())
                if message is None:
                    message = worker_pb2.WorkerMessage(beat=self._stats())
                    beat_at = self._loop.time() + self._beat_interval_s
                yield message
        finally:
            reader.cancel()
            for turn_id in [t for t, stream in self._stream_of.items() if stream is outbox]:
                del self._stream_of[turn_id]
                self._leader.abort(turn_id)

    async def _read(
        self, requests: AsyncIterator[worker_pb2.RouterMessage], outbox: asyncio.Queue[worker_pb2.WorkerMessage]
    ) -> None:
        async for message in requests:
            if message.WhichOneof("message") == "abort":
                self._leader.abort(message.abort.turn_id)
                continue
            submit = message.submit
            self._stream_of[submit.turn_id] = outbox
            try:
                if self._draining:
                    raise NoWorkerAvailable(f"worker {self.worker_id} is draining")
                submission = submission_of(submit)
                (self._loads or self._leader).submit(submission)
            except (InvalidRequest, NoWorkerAvailable) as error:
                self._deliver([TurnUpdate(submit.turn_id, error=error)])

    def _emit(self, updates: list[TurnUpdate]) -> None:
        """Called in the leader's thread, once a step."""
        self._loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: list[TurnUpdate]) -> None:
        by_stream: dict[asyncio.Queue[worker_pb2.WorkerMessage], worker_pb2.StepUpdates] = {}
        for update in updates:
            outbox = self._stream_of.get(update.turn_id)
            if outbox is None:
                continue
            if update.finish is not None or update.error is not None or update.needs_history:
                del self._stream_of[update.turn_id]
            by_stream.setdefault(outbox, worker_pb2.StepUpdates()).updates.append(update_message(update))
        for outbox, step in by_stream.items():
            outbox.put_nowait(worker_pb2.WorkerMessage(step=step))

    # ---- control plane ----------------------------------------------------------------------------

    @sends_errors
    async def Release(
        self, request: worker_pb2.WorkerReleaseRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ControlResponse:
        after_turn = request.mode == session_pb2.RELEASE_MODE_AFTER_TURN
        return await self._once(
            ("release", request.session_id, request.epoch, request.request_id),
            lambda: self._leader.release_session(
                request.session_id, request.epoch, after_turn=after_turn, moved=request.moved
            ),
        )

    @sends_errors
    async def FreeTail(
        self, request: worker_pb2.WorkerFreeTailRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ControlResponse:
        return await self._once(
            ("free_tail", request.session_id, request.epoch, request.request_id),
            lambda: self._leader.free_tail(request.session_id, request.epoch, request.keep_len),
        )

    def _once(
        self, key: tuple[str, str, int, str], ask: Callable[[], Future[worker_pb2.ControlResponse]]
    ) -> Awaitable[worker_pb2.ControlResponse]:
        """Run a control-plane request once; a retry gets the same answer."""
        future = self._answers.get(key) if key[-1] else None
        if future is None:
            future = ask()
            if key[-1]:
                self._answers[key] = future
                if len(self._answers) > MAX_ANSWERS:
                    self._answers.popitem(last=False)
        return result_of(future)

    @sends_errors
    async def Fork(
        self, request: worker_pb2.WorkerForkRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerForkResponse:
        shared_len = await result_of(
            self._leader.fork(request.session_id, request.child_id, request.epoch, request.at_len)
        )
        return worker_pb2.WorkerForkResponse(shared_len=shared_len)

    @sends_errors
    async def Audit(
        self, request: worker_pb2.AuditRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AuditResponse:
        report = await result_of(self._leader.audit())
        report.worker_id, report.incarnation = self.worker_id, self.incarnation
        return report

    async def Stats(
        self, request: worker_pb2.StatsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerStats:
        return self._stats()

    async def Slots(
        self, request: worker_pb2.SlotsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SlotsResponse:
        session_ids = await result_of(self._leader.migrations.sessions())
        copied = await self._copies.owners() if self._copies is not None else []
        return worker_pb2.SlotsResponse(
            session_ids=session_ids, copied_session_ids=copied or (), copies_unknown=copied is None
        )

    @sends_errors
    async def Import(
        self, request: worker_pb2.ImportRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ImportResponse:
        if self._draining:
            raise NoWorkerAvailable(f"worker {self.worker_id} is draining")
        return await self._importer.import_session(request)

    async def Export(
        self, request: worker_pb2.ExportRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.ExportResponse]:
        try:
            async with aclosing(export_session(self._leader, request, self._addresses)) as answers:
                async for answer in answers:
                    yield answer
        except HoldfastError as error:
            await abort_with(context, error)

    async def Stop(self, request: worker_pb2.StopRequest, context: grpc.aio.ServicerContext) -> worker_pb2.StopResponse:
        self._loop.call_later(STOP_DELAY_S, self._on_lost, f"worker {self.worker_id} is stopped by a request")
        return worker_pb2.StopResponse()

    @sends_errors
    async def Flush(
        self, request: worker_pb2.FlushRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ControlResponse:
        return await result_of(self._leader.flush(request.tenant if request.HasField("tenant") else None))

    async def Pause(
        self, request: worker_pb2.PauseRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.PauseResponse:
        if request.paused and request.mode == worker_pb2.PAUSE_MODE_ABORT:
            self._leader.end_all(Finish("abort"))
        scheduler = self._leader.scheduler

        def pause() -> None:
            scheduler.paused = request.paused
            self._leader.collect()
            if request.paused and request.mode == worker_pb2.PAUSE_MODE_RETRACT:
                scheduler.retract_all()

        await result_of(self._leader.call(pause))
        return worker_pb2.PauseResponse()

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DrainResponse:
        self._draining = True
        deadline = self._loop.time() + request.timeout_s
        await result_of(self._leader.call(lambda: None))  # what was submitted before is a turn, or waits to be one
        while self._num_turns() and self._loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        num_preempted = self._num_turns()
        # Their routers fail them over, as if this worker had died.
        self._leader.end_all(NoWorkerAvailable(f"worker {self.worker_id} is draining"))
        while self._num_turns():
            await asyncio.sleep(DRAIN_POLL_S)
        await result_of(self._leader.migrations.close())
        return worker_pb2.DrainResponse(turns_preempted=num_preempted)

    def _num_turns(self) -> int:
        """Turns that run or wait, and those that are not admitted yet: a grammar is compiled for them, or KV loaded."""
        return len(self._leader.scheduler.turns) + self._leader.gate.num_waiting

    def _welcome(self) -> worker_pb2.Welcome:
        rank = self._leader.rank
        return worker_pb2.Welcome(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            context_len=self._leader.scheduler.max_len,
            page_size=rank.cache.page_size,
            vocab_size=rank.model_config.vocab_size,
            lifelines=self._lifelines,
        )

    def _stats(self) -> worker_pb2.WorkerStats:
        # Read while the engine runs: each figure is exact, but they may be of different steps.
        scheduler = self._leader.scheduler
        counters = Counter(self._leader.counters)
        counters["recomputed_tokens"] = scheduler.num_recomputed
        kv_store = None
        if self._copies is not None and self._loads is not None:
            counters += self._copies.counters + self._loads.counters
            stats = self._copies.stats
            kv_store = worker_pb2.KVStoreStats(
                bytes_total=stats.bytes_total,
                bytes_used=stats.bytes_used,
                copies=stats.copies,
                waiting=self._copies.num_waiting,
                replicas=stats.replicas,
                disk_bytes_used=stats.disk_bytes_used,
                counters=stats.counters,
            )
        return worker_pb2.WorkerStats(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            pid=os.getpid(),
            groups=[
                worker_pb2.GroupPages(
                    group=group.name,
                    total=group.pool.num_pages,
                    free=group.pool.num_free,
                    cached=group.pool.num_cached,
                    held=group.pool.num_held,
                )
                for group in self._leader.cache.groups
            ],
            sessions=len(self._leader.cache.slots),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            retracted=scheduler.num_retracted,
            counters=dict(counters),
            draining=self._draining,
            paused=scheduler.paused,
            metrics_url=self._metrics.url,
            kv_store=kv_store,
            ranks=[
                worker_pb2.RankStats(pid=os.getpid(), node=self._node, log_index=self._leader.log.last_index),
                *self._links.stats(self._leader.log),
            ],
        )
