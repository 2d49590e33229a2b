"""A link to a worker: one gRPC stream, shared by all turns of this router."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from holdfast import tls
from holdfast.errors import IncompatibleVersion, NoWorkerAvailable
from holdfast.lifeline import one_ended
from holdfast.silence import silent_for
from holdfast.v1 import session_pb2, worker_pb2, worker_pb2_grpc
from holdfast.wire import CHANNEL_OPTIONS, error_from_rpc, sent_error, was_closed
from router.fleet.inbox import TurnInbox
from router.fleet.placement import WorkerView

log = logging.getLogger("holdfast.router")
RECONNECT_PAUSE_S = 0.1
LINK_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
"""Channels do not share connections, so that a new channel makes a new connection."""


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A worker as the supervisor announces it."""

    worker_id: str
    incarnation: int
    address: str
    max_turns: int

    @property
    def name(self) -> str:
        """The name in pins. Another incarnation is another worker: it does not have this one's KV."""
        return f"{self.worker_id}@{self.incarnation}"


@dataclass(frozen=True, slots=True)
class Home:
    """Where copies of a worker's KV are, if its nodes have KV stores: on these, and on those that they copy to."""

    nodes: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()


class WorkerLink:
    """One worker. ``alive`` while its stream is open and a message arrived within the lease."""

    def __init__(
        self,
        address: WorkerAddress,
        lease_s: float,
        on_attached: Callable[[WorkerLink], None] = lambda link: None,
    ) -> None:
        self.address = address
        self.name = address.name
        self.welcome: worker_pb2.Welcome | None = None
        self.stats = worker_pb2.WorkerStats()
        self._lease_s = lease_s
        self._on_attached = on_attached
        self._connect()
        self._outbox: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue()
        self._inboxes: dict[str, TurnInbox] = {}
        self._num_heard = 0
        self._refused = ""
        self.ready = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def alive(self) -> bool:
        return self.welcome is not None

    @property
    def home(self) -> Home:
        """As the worker last said."""
        return Home(tuple(dict.fromkeys(rank.node for rank in self.stats.ranks)), tuple(self.stats.kv_store.replicas))

    def view(self, live_turns: int) -> WorkerView:
        return WorkerView(self.name, live_turns, self.stats.sessions, self.address.max_turns)

    def submit(self, submit: worker_pb2.Submit) -> TurnInbox:
        """Send a turn. Its updates arrive in the returned inbox."""
        inbox = TurnInbox()
        if self.alive:
            self._inboxes[submit.turn_id] = inbox
            self._outbox.put_nowait(worker_pb2.RouterMessage(submit=submit))
        else:
            inbox.put(None)  # the worker was lost after it was chosen
        return inbox

    def abort(self, turn_id: str) -> None:
        """Abort a turn if it is live, and drop its further updates."""
        if self._inboxes.pop(turn_id, None) is not None:
            self._outbox.put_nowait(worker_pb2.RouterMessage(abort=worker_pb2.Abort(turn_id=turn_id)))

    def interrupt(self, turn_id: str) -> None:
        """As ``abort``, and wake the turn's relay."""
        inbox = self._inboxes.get(turn_id)
        self.abort(turn_id)
        if inbox is not None:
            inbox.put(None)

    # ---- control plane: each call returns within ``timeout_s`` or raises a HoldfastError ----------

    async def release(self, session_id: str, epoch: int, mode: int, timeout_s: float, *, moved: bool = False) -> int:
        """Returns the pages freed. ``moved``: it is another worker's now, and copies of its KV stay."""
        request = worker_pb2.WorkerReleaseRequest(
            session_id=session_id,
            epoch=epoch,
            mode=session_pb2.ReleaseMode.Name(mode),
            request_id=uuid.uuid4().hex,
            moved=moved,
        )
        return await self._control(self._stub.Release, request, timeout_s)

    async def free_tail(self, session_id: str, epoch: int, keep_len: int, timeout_s: float) -> int:
        request = worker_pb2.WorkerFreeTailRequest(session_id=session_id, epoch=epoch, keep_len=keep_len)
        request.request_id = uuid.uuid4().hex
        return await self._control(self._stub.FreeTail, request, timeout_s)

    async def fork(self, session_id: str, child_id: str, epoch: int, at_len: int, timeout_s: float) -> int:
        request = worker_pb2.WorkerForkRequest(session_id=session_id, child_id=child_id, epoch=epoch, at_len=at_len)
        answer = await self._call(self._stub.Fork, request, timeout_s)
        return int(answer.shared_len)

    async def audit(self, timeout_s: float) -> worker_pb2.AuditResponse:
        report: worker_pb2.AuditResponse = await self._call(self._stub.Audit, worker_pb2.AuditRequest(), timeout_s)
        return report

    async def fetch_stats(self, timeout_s: float) -> worker_pb2.WorkerStats:
        stats: worker_pb2.WorkerStats = await self._call(self._stub.Stats, worker_pb2.StatsRequest(), timeout_s)
        return stats

    async def drain(self, timeout_s: float, grace_s: float) -> int:
        """Have the worker stop admitting turns. Returns how many it preempted after ``timeout_s``."""
        request = worker_pb2.DrainRequest(timeout_s=timeout_s)
        answer: worker_pb2.DrainResponse = await self._call(self._stub.Drain, request, timeout_s + grace_s)
        self.stats.draining = True
        return answer.turns_preempted

    async def slots(self, timeout_s: float) -> tuple[list[str], list[str] | None]:
        """The sessions that have a slot on the worker, and those of whose KV its node has copies; None: not known."""
        answer: worker_pb2.SlotsResponse = await self._call(self._stub.Slots, worker_pb2.SlotsRequest(), timeout_s)
        return list(answer.session_ids), None if answer.copies_unknown else list(answer.copied_session_ids)

    async def import_session(
        self, session_id: str, epoch: int, source_address: str, timeout_s: float
    ) -> worker_pb2.ImportResponse:
        """Have the worker read an idle session's KV from another. Raises MigrationRefused if that does not pay."""
        request = worker_pb2.ImportRequest(
            session_id=session_id, epoch=epoch, source_address=source_address, timeout_s=timeout_s
        )
        answer: worker_pb2.ImportResponse = await self._call(self._stub.Import, request, timeout_s)
        return answer

    async def stop(self, timeout_s: float) -> None:
        """End the worker. The supervisor starts its next incarnation."""
        await self._call(self._stub.Stop, worker_pb2.StopRequest(), timeout_s)

    async def pause(self, mode: int, timeout_s: float) -> None:
        """Have the worker compute nothing until ``go_on``; ``mode``: what becomes of its turns."""
        request = worker_pb2.PauseRequest(paused=True, mode=worker_pb2.PauseMode.Name(mode))
        await self._call(self._stub.Pause, request, timeout_s)
        self.stats.paused = True

    async def go_on(self, timeout_s: float) -> None:
        """End a pause."""
        await self._call(self._stub.Pause, worker_pb2.PauseRequest(paused=False), timeout_s)

    async def flush(self, tenant: str | None, timeout_s: float) -> int:
        """Drop idle slots and cached pages, with ``tenant`` only that tenant's."""
        return await self._control(self._stub.Flush, worker_pb2.FlushRequest(tenant=tenant), timeout_s)

    async def _control(self, method: Any, request: Message, timeout_s: float) -> int:
        """The pages freed on each rank; the worker has compared the ranks' digests."""
        answer: worker_pb2.ControlResponse = await self._call(method, request, timeout_s)
        return int(answer.ranks[0].pages_freed)

    async def _call(self, method: Any, request: Message, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        except grpc.aio.UsageError:  # the link was closed since its caller took it
            raise NoWorkerAvailable(f"worker {self.name} is lost") from None
        except asyncio.CancelledError:
            if was_closed():
                raise NoWorkerAvailable(f"worker {self.name} is lost") from None
            raise

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._drop_turns()
        await self._channel.close()

    # ---- inside -----------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._channel = tls.channel(self.address.address, LINK_OPTIONS)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def _run(self) -> None:
        while True:
            try:
                await self._attach()
                reason = "the stream was closed"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                if isinstance(sent_error(error), IncompatibleVersion) and reason != self._refused:
                    self._refused = reason  # once, though it is tried again and again
                    log.error("worker %s cannot be used: %s", self.name, error.details())
            except NoWorkerAvailable as error:
                reason = error.message
            except TimeoutError:
                reason = f"silent for {self._lease_s} s"
            except Exception as error:
                # If this task ended, the router would never reach the worker again.
                reason = repr(error)
            self._lose(reason)
            await asyncio.sleep(RECONNECT_PAUSE_S)
            # After a partition, the old connection would wait for its next retransmission or the end of
            # a back-off, which takes about as long as the partition lasted.
            old = self._channel
            self._connect()
            await old.close()

    async def _attach(self) -> None:
        outbox: asyncio.Queue[worker_pb2.RouterMessage] = asyncio.Queue()
        self._outbox = outbox

        call = self._stub.Attach()
        writer = asyncio.create_task(_write(call, outbox))
        reader = asyncio.create_task(self._read(call))
        silence = asyncio.create_task(silent_for(self._lease_s, lambda: self._num_heard))
        death = asyncio.create_task(self._death())
        try:
            await asyncio.wait((reader, silence, death), return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                death.result()
                raise NoWorkerAvailable("a process of it has ended")
            if not reader.done():
                raise TimeoutError
            reader.result()
        finally:
            tasks = (writer, reader, silence, death)
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _death(self) -> None:
        """Returns when a process of the worker has ended."""
        await self.ready.wait()
        assert self.welcome is not None
        await one_ended(self.welcome.lifelines)

    async def _read(self, call: Any) -> None:
        while (message := await call.read()) is not grpc.aio.EOF:
            self._num_heard += 1
            self._receive(message)

    def _receive(self, message: worker_pb2.WorkerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "step":
            for update in message.step.updates:
                inbox = self._inboxes.get(update.turn_id)
                if inbox is None:
                    continue
                if update.finish_reason or update.error_code or update.needs_history:
                    del self._inboxes[update.turn_id]
                inbox.put(update)
        elif kind == "beat":
            self.stats = message.beat
        elif kind == "welcome" and message.welcome.incarnation == self.address.incarnation:
            self.welcome = message.welcome
            self.ready.set()
            self._on_attached(self)

    def _lose(self, reason: str) -> None:
        if self.alive:
            log.warning("worker %s is lost: %s; failing over %d turns", self.name, reason, len(self._inboxes))
        self._drop_turns()

    def _drop_turns(self) -> None:
        self.welcome = None
        self.ready.clear()
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put(None)


async def _write(call: Any, outbox: asyncio.Queue[worker_pb2.RouterMessage]) -> None:
    while True:
        await call.write(await outbox.get())
