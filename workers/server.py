"""A worker's gRPC server: streams of turns from routers, and the control plane."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from holdfast.errors import HoldfastError, InvalidRequest, NoWorkerAvailable
from holdfast.tokens import unpack_tokens
from holdfast.v1 import kv_pb2_grpc, session_pb2, worker_pb2, worker_pb2_grpc
from holdfast.wire import SERVER_OPTIONS, abort_with, answers_errors
from holdfast.worker_metrics import WorkerCollector
from workers.collectives import Collectives
from workers.config import EngineConfig
from workers.handover_rpc import Importer, KVServer, hold_for_reader
from workers.leader import Leader
from workers.messages import Submission, TurnUpdate
from workers.rank_links import RankLinks
from workers.sampler import TokenLogprobs
from workers.scheduling import SamplingParams

log = logging.getLogger("holdfast.worker")
T = TypeVar("T")
BEAT_INTERVAL_S = 0.25
"""Several beats fit into a router's lease (2 s), so that one late beat is not a death."""
MIN_TEMPERATURE = 1e-5
"""A lower one is greedy: logits divided by it would overflow."""
DRAIN_POLL_S = 0.02
STOP_DELAY_S = 0.05
"""For the answer to get out before the process ends."""
MAX_ANSWERS = 1024
"""Answers of the control plane that are kept for whoever asks again."""
SERVICE = "holdfast.v1.WorkerService"


class WorkerServer(worker_pb2_grpc.WorkerServiceServicer):
    """One worker's face. Runs in an asyncio loop; the engine has a thread of its own.

    ``group``: the ranks of which this one leads, if there are several. ``on_lost`` is called, from any
    thread, when the worker must end, with the reason.
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
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, followers: Callable[[], dict[int, str]] = dict) -> str:
        """Load the model and serve on a free port of ``host``; returns the address.

        ``followers`` gives the other ranks' addresses when they are ready; it may wait for them.
        """
        self._leader = await asyncio.to_thread(self._load)
        self._importer = Importer(self._leader, self._links)
        addresses = await asyncio.to_thread(followers)
        timeout_s = self._config.collective_timeout_s
        await self._links.connect(addresses, self._leader.log, self._leader.cache.digest(), timeout_s)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)
        kv_pb2_grpc.add_KVServiceServicer_to_server(KVServer(self._leader), server)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection(names, server)
        port = server.add_insecure_port(f"{host}:0")
        registry = CollectorRegistry()
        registry.register(WorkerCollector(lambda: [self._stats()]))
        self._metrics_server, _ = start_http_server(0, host, registry)
        self._metrics_url = f"http://{host}:{self._metrics_server.server_port}/metrics"
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
        """The other ranks are about to stop: that they leave is no loss."""
        self._links.expect_end()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=0.2)
            await asyncio.to_thread(self._metrics_server.shutdown)
            self._metrics_server.server_close()
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
                try:  # a beat that is due goes first, also where there is always something else to send
                    message = await asyncio.wait_for(outbox.get(), beat_at - self._loop.time())
                except TimeoutError:
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
                self._leader.submit(_submission(submit))
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
            by_stream.setdefault(outbox, worker_pb2.StepUpdates()).updates.append(_update_message(update))
        for outbox, step in by_stream.items():
            outbox.put_nowait(worker_pb2.WorkerMessage(step=step))

    # ---- control plane ----------------------------------------------------------------------------

    @answers_errors
    async def Release(
        self, request: worker_pb2.WorkerReleaseRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ControlResponse:
        after_turn = request.mode == session_pb2.RELEASE_MODE_AFTER_TURN
        return await self._once(
            ("release", request.session_id, request.epoch, request.request_id),
            lambda: self._leader.release_session(request.session_id, request.epoch, after_turn=after_turn),
        )

    @answers_errors
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
        """The answer to a request of the control plane; to the same request again, the same answer."""
        future = self._answers.get(key) if key[-1] else None
        if future is None:
            future = ask()
            if key[-1]:
                self._answers[key] = future
                if len(self._answers) > MAX_ANSWERS:
                    self._answers.popitem(last=False)
        return _result(future)

    @answers_errors
    async def Fork(
        self, request: worker_pb2.WorkerForkRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerForkResponse:
        future = self._leader.fork(request.session_id, request.child_id, request.epoch, request.at_len)
        return worker_pb2.WorkerForkResponse(shared_len=await _result(future))

    @answers_errors
    async def Audit(
        self, request: worker_pb2.AuditRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AuditResponse:
        report = await _result(self._leader.audit())
        report.worker_id, report.incarnation = self.worker_id, self.incarnation
        return report

    async def Stats(
        self, request: worker_pb2.StatsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerStats:
        return self._stats()

    async def Slots(
        self, request: worker_pb2.SlotsRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SlotsResponse:
        return worker_pb2.SlotsResponse(session_ids=await _result(self._leader.sessions()))

    @answers_errors
    async def Import(
        self, request: worker_pb2.ImportRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ImportResponse:
        if self._draining:
            raise NoWorkerAvailable(f"worker {self.worker_id} is draining")
        return await self._importer.take_over(request)

    async def Export(
        self, request: worker_pb2.ExportRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.ExportResponse]:
        try:
            async with aclosing(hold_for_reader(self._leader, request, self._addresses)) as answers:
                async for answer in answers:
                    yield answer
        except HoldfastError as error:
            await abort_with(context, error)

    async def Stop(self, request: worker_pb2.StopRequest, context: grpc.aio.ServicerContext) -> worker_pb2.StopResponse:
        self._loop.call_later(STOP_DELAY_S, self._on_lost, f"worker {self.worker_id} was told to stop")
        return worker_pb2.StopResponse()

    @answers_errors
    async def Flush(
        self, request: worker_pb2.FlushRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ControlResponse:
        return await _result(self._leader.flush())

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DrainResponse:
        self._draining = True
        deadline = self._loop.time() + request.timeout_s
        turns = self._leader.scheduler.turns
        while turns and self._loop.time() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        moved = len(turns)
        # Their routers take them elsewhere, as if this worker had died.
        self._leader.turn_away(NoWorkerAvailable(f"worker {self.worker_id} is draining"))
        while turns:
            await asyncio.sleep(DRAIN_POLL_S)
        return worker_pb2.DrainResponse(turns_moved=moved)

    def _welcome(self) -> worker_pb2.Welcome:
        rank = self._leader.rank
        return worker_pb2.Welcome(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            context_len=self._leader.scheduler.max_len,
            page_size=rank.cache.page_size,
            vocab_size=rank.model_config.vocab_size,
        )

    def _stats(self) -> worker_pb2.WorkerStats:
        # Read without stopping the engine: each figure is right, together they may be a step apart.
        scheduler, pool = self._leader.scheduler, self._leader.cache.pool
        counters = Counter(self._leader.counters)
        return worker_pb2.WorkerStats(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            pid=os.getpid(),
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            pages_held=pool.num_held,
            sessions=len(self._leader.cache.slots),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            retracted=scheduler.num_retracted,
            counters=dict(counters),
            draining=self._draining,
            metrics_url=self._metrics_url,
            ranks=[
                worker_pb2.RankStats(pid=os.getpid(), node=self._node, log_index=self._leader.log.last_index),
                *self._links.stats(self._leader.log),
            ],
        )


async def _result(future: Future[T]) -> T:
    # Shielded: a caller that gives up must not cancel what the engine will answer, perhaps to another.
    return await asyncio.shield(asyncio.wrap_future(future))


def _submission(submit: worker_pb2.Submit) -> Submission:
    try:
        tokens = unpack_tokens(submit.tokens)
    except ValueError:
        raise InvalidRequest("tokens: not a whole number of 32-bit integers") from None
    return Submission(
        turn_id=submit.turn_id,
        session_id=submit.session_id,
        tenant=submit.tenant,
        epoch=submit.epoch,
        tokens=tokens,
        prompt_len=submit.prompt_len,
        params=sampling_params(submit.sampling),
        ephemeral=submit.ephemeral,
        prefix_len=submit.prefix_len,
        prefix_crc=submit.prefix_crc,
    )


def sampling_params(s: session_pb2.Sampling) -> SamplingParams:
    """The engine's parameters from the wire's; routers have checked their ranges."""

    def given(name: str, default: Any) -> Any:
        return getattr(s, name) if s.HasField(name) else default

    return SamplingParams(
        # Below that fp32 logits overflow, and no second token has any chance.
        temperature=s.temperature if s.temperature >= MIN_TEMPERATURE else 0.0,
        top_k=s.top_k,
        top_p=given("top_p", 1.0),
        min_p=s.min_p,
        repetition_penalty=given("repetition_penalty", 1.0),
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        seed=given("seed", 0),
        max_tokens=given("max_tokens", 2**31 - 1),
        min_tokens=s.min_tokens,
        stop=tuple(s.stop),
        stop_token_ids=frozenset(s.stop_token_ids),
        ignore_eos=s.ignore_eos,
        num_logprobs=given("logprobs", -1),
        logprob_start=given("logprob_start", -1),
    )


def _logprob_message(logprobs: TokenLogprobs) -> session_pb2.TokenLogprob:
    top = [session_pb2.TopLogprob(token=token, logprob=value) for token, value in logprobs.top]
    return session_pb2.TokenLogprob(token=logprobs.token, logprob=logprobs.logprob, top=top)


def _update_message(update: TurnUpdate) -> worker_pb2.TurnUpdate:
    message = worker_pb2.TurnUpdate(
        turn_id=update.turn_id,
        tokens=update.tokens,
        logprobs=[_logprob_message(item) for item in update.logprobs],
        input_logprobs=[_logprob_message(item) for item in update.input_logprobs],
        cached_len=update.cached_len,
        needs_history=update.needs_history,
    )
    if update.finish is not None:
        message.finish_reason = update.finish.reason
        if isinstance(update.finish.matched, int):
            message.matched_token = update.finish.matched
        elif update.finish.matched is not None:
            message.matched_text = update.finish.matched
    if update.error is not None:
        message.error_code, message.error_message = update.error.code, update.error.message
    return message
