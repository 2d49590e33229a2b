"""Simulated gRPC over a simulated network: the real stubs and servicers, between simulated processes.

A message takes a random time; those of one stream keep their order, others overtake each other. A link
that is cut holds what is sent over it. As with TCP, whose retransmissions come ever later, a connection
that was held up by a cut goes on up to as long after it as it was held up; a new one goes through at once.
The death of a process breaks its streams, once its peers can hear of it.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from holdfast.wire import was_closed
from tests.simulation.loop import PROCESS, Process

NOBODY = contextvars.Context()
"""What is under way belongs to no process: it arrives even if its sender is dead by then."""


class Network:
    """Hosts, links, and the servers that listen."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.latency_s = (0.0002, 0.002)
        self._servers: dict[str, SimulatedServer] = {}
        self._ports = itertools.count(1)
        self._cuts: set[tuple[str, str]] = set()
        self._stalled: list[Connection] = []
        self.calls: list[Call] = []

    def channel(self, address: str, **_: Any) -> SimulatedChannel:
        process = PROCESS.get()
        assert process is not None, "channels are opened by processes"
        return SimulatedChannel(self, process, address)

    def server(self, **_: Any) -> SimulatedServer:
        process = PROCESS.get()
        assert process is not None, "servers are started by processes"
        return SimulatedServer(self, process)

    def listen(self, server: SimulatedServer, address: str) -> int:
        port = next(self._ports) if address.endswith(":0") else int(address.rpartition(":")[2])
        self._servers[f"{address.rpartition(':')[0]}:{port}"] = server
        return port

    def at(self, address: str) -> SimulatedServer | None:
        server = self._servers.get(address)
        return server if server is not None and server.process.alive else None

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from one host to the other; the other way is another cut."""
        self._cuts.add((source, target))

    def is_whole(self, source: str, target: str) -> bool:
        return (source, target) not in self._cuts

    def heal(self) -> None:
        self._cuts.clear()
        stalled, self._stalled = self._stalled, []
        for connection in stalled:
            connection.retransmit()

    def stalls(self, connection: Connection) -> bool:
        """Whether the link is cut; the connection is notified when it heals."""
        if (connection.source, connection.target) not in self._cuts:
            return False
        self._stalled.append(connection)
        return True

    def kill(self, process: Process) -> None:
        """kill -9: its peers hear that its connections are gone."""
        process.kill()
        for call in self.calls:
            call.lost(process)


class Connection:
    """One direction of a channel's TCP connection, which all its streams share."""

    def __init__(self, network: Network, source: str, target: str) -> None:
        self.network, self.source, self.target = network, source, target
        self._held: list[Lane] = []
        self._held_since = 0.0

    def holds(self, lane: Lane) -> bool:
        """Whether nothing gets through now; the lane is pumped when it does."""
        if not self._held:
            if not self.network.stalls(self):
                return False
            self._held_since = asyncio.get_running_loop().time()
        self._held.append(lane)
        return True

    def retransmit(self) -> None:
        """The link is whole: what was held gets through some time later, unless it is cut again by then."""
        loop = asyncio.get_running_loop()
        later = self.network.rng.uniform(0, loop.time() - self._held_since)
        loop.call_later(later, self._go_on, context=NOBODY.copy())

    def _go_on(self) -> None:
        if not self.network.stalls(self):
            held, self._held = self._held, []
            for lane in held:
                lane.pump()


class Lane:
    """One direction of one stream: messages arrive in order, each some time after it was sent."""

    def __init__(self, connection: Connection, source: Process, target: Process) -> None:
        self.network, self.source, self.target = connection.network, source, target
        self._connection = connection
        self._messages: deque[tuple[float, Callable[[], None]]] = deque()

    def send(self, deliver: Callable[[], None]) -> None:
        """``deliver`` will run in the target process."""
        at = asyncio.get_running_loop().time() + self.network.rng.uniform(*self.network.latency_s)
        self._messages.append((at, deliver))
        if len(self._messages) == 1:
            self.pump()

    def pump(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(max(loop.time(), self._messages[0][0]), self._arrive, context=NOBODY.copy())

    def _arrive(self) -> None:
        if self._connection.holds(self):
            return
        _, deliver = self._messages.popleft()
        asyncio.get_running_loop().call_soon(deliver, context=self.target.context.copy())
        if self._messages:
            self.pump()


class SimulatedChannel:
    """As much of ``grpc.aio.Channel`` as the generated stubs use."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self.network, self.process, self.address = network, process, address
        self._calls: list[Call] = []
        self._is_closed = False
        host = address.rpartition(":")[0]
        self.up, self.down = Connection(network, process.host, host), Connection(network, host, process.host)

    def _multi(self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any) -> Any:
        def start(request: Any = None, timeout: float | None = None, **_: Any) -> Call:
            if self._is_closed:
                raise grpc.aio.UsageError("Channel is closed.")
            call = Call(self, path, request_serializer, response_deserializer, timeout)
            self._calls.append(call)
            if request is not None:
                call.send(request)
            return call

        return start

    stream_stream = unary_stream = _multi

    def unary_unary(self, path: str, **codecs: Any) -> Any:
        start = self._multi(path, **codecs)

        async def ask(request: Any, timeout: float | None = None, **_: Any) -> Any:
            call = start(request, timeout=timeout)
            try:
                async with asyncio.timeout(timeout):
                    answer = await call.read()
            except TimeoutError:
                raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            finally:
                call.cancel()
            return answer

        return ask

    async def close(self) -> None:
        self._is_closed = True
        for call in self._calls:
            call.cancel()

    async def __aenter__(self) -> SimulatedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def rpc_error(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


class Call:
    """A call, seen from its client; ``_Served`` is its other end."""

    def __init__(self, channel: SimulatedChannel, path: str, serialize: Any, deserialize: Any, timeout: Any) -> None:
        self._network, self.client = channel.network, channel.process
        server = self._network.at(channel.address)
        # If nothing listens, the host answers.
        target = server.process if server is not None else Process("nobody", channel.address)
        self.up, self.down = Lane(channel.up, self.client, target), Lane(channel.down, target, self.client)
        self._serialize, self._deserialize = serialize, deserialize
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._end: BaseException | None = None
        self.served: _Served | None = None
        self._server = server
        self._network.calls.append(self)
        if server is None:
            self.down.send(lambda: self.end(rpc_error(grpc.StatusCode.UNAVAILABLE, "Connection refused")))
        else:
            self.up.send(lambda: self._accept(path))

    def _accept(self, path: str) -> None:
        assert self._server is not None
        self.served = _Served(self, self._server.handlers[path])

    def send(self, request: Any) -> None:
        data = self._serialize(request)
        self.up.send(lambda: self.served and self.served.requests.put_nowait(data))

    async def write(self, request: Any) -> None:
        if self._end is not None:
            raise self._end if isinstance(self._end, grpc.aio.AioRpcError) else asyncio.InvalidStateError("RPC is done")
        self.send(request)
        await asyncio.sleep(0)

    async def read(self) -> Any:
        if self._end is not None and self._answers.empty():
            return self._ended()
        data = await self._answers.get()
        return self._ended() if data is None else self._deserialize(data)

    def _ended(self) -> Any:
        if isinstance(self._end, grpc.aio.AioRpcError):
            raise self._end
        if isinstance(self._end, asyncio.CancelledError):
            raise asyncio.CancelledError
        return grpc.aio.EOF

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        try:
            answer = await self.read()
        except asyncio.CancelledError:
            if was_closed():
                raise rpc_error(grpc.StatusCode.CANCELLED, "Locally cancelled") from None
            raise
        if answer is grpc.aio.EOF:
            raise StopAsyncIteration
        return answer

    def cancel(self) -> None:
        """As gRPC's: whoever waits for an answer is cancelled, and told so where it iterates."""
        if self._end is None:
            self.end(asyncio.CancelledError())
            self.up.send(lambda: self.served and self.served.cancel())

    # ---- what arrives at the client -----------------------------------------------------------------

    def answer(self, data: bytes) -> None:
        if self._end is None:
            self._answers.put_nowait(data)

    def end(self, reason: BaseException) -> None:
        if self._end is None:
            self._end = reason
            self._answers.put_nowait(None)
            if self in self._network.calls:
                self._network.calls.remove(self)

    def lost(self, process: Process) -> None:
        """A process died: if it was an end of this call, the other hears of it."""
        if process is self.down.source:
            gone = rpc_error(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
            self.down.send(lambda: self.end(gone))
        elif process is self.client:
            self.up.send(lambda: self.served and self.served.cancel())


class _Served:
    """A call at its server: runs the servicer's method in a task of the server's process."""

    def __init__(self, call: Call, handler: Any) -> None:
        self._call, self._handler = call, handler
        self.requests: asyncio.Queue[bytes] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def cancel(self) -> None:
        self._task.cancel()

    async def _serve(self) -> None:
        call, handler = self._call, self._handler
        try:
            if handler.request_streaming:
                answers = handler.stream_stream(self._requests(), _Context())
            else:
                request = handler.request_deserializer(await self.requests.get())
                if not handler.response_streaming:
                    self._answer(await handler.unary_unary(request, _Context()))
                    return
                answers = handler.unary_stream(request, _Context())
            async for answer in answers:
                self._answer(answer)
            call.down.send(lambda: call.end(EOFError()))
        except _Abort as abort:
            error = rpc_error(abort.code, abort.details, abort.trailing)
            call.down.send(lambda: call.end(error))
        except Exception as error:
            failed = rpc_error(grpc.StatusCode.UNKNOWN, f"{error!r}")
            call.down.send(lambda: call.end(failed))
            raise

    def _answer(self, message: Any) -> None:
        data = self._handler.response_serializer(message)
        self._call.down.send(lambda: self._call.answer(data))

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            yield self._handler.request_deserializer(await self.requests.get())


class _Abort(Exception):
    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any) -> None:
        self.code, self.details, self.trailing = code, details, trailing


class _Context:
    """As much of a servicer's context as ours use."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        raise _Abort(code, details, trailing_metadata)


class SimulatedServer:
    """As much of ``grpc.aio.Server`` as ours use."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self.process = network, process
        self.handlers: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_insecure_port(self, address: str) -> int:
        return self._network.listen(self, address)

    async def start(self) -> None:
        pass

    async def stop(self, grace: float | None) -> None:
        pass
