"""A router's servers: HTTP and gRPC over one core."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import uvicorn
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from holdfast.errors import ConfigError
from holdfast.interceptors import Strangers
from holdfast.v1 import session_pb2_grpc
from holdfast.wire import SERVER_OPTIONS
from router.access.certificate import ServedCertificate
from router.access.keys import Keyring
from router.batches.runner import BatchRunner
from router.config import RouterConfig
from router.connections import http_settings
from router.core import RouterCore
from router.faces.grpc_service import SessionServer
from router.faces.http_app import http_app
from router.faces.inner_calls import inner_calls
from router.fleet.link import WorkerAddress
from router.journal.interface import Journal
from router.journal.redis import RedisJournal
from router.journal.sqlite import SqliteJournal
from router.listening import listen, share_port
from router.metrics import Metrics
from router.text import TextCodec

SERVICE = "holdfast.v1.SessionService"
MAX_STREAMS = 1024
"""Calls at once of one gRPC connection; further ones wait."""
RETIRE_POLL_S = 0.1
LAST = (b"connection", b"close")
"""A header of answers after which the connection ends."""


class _HttpServer(uvicorn.Server):
    """uvicorn's server without signal handlers: the process has other servers, and its own handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _certificate(config: RouterConfig) -> ServedCertificate | None:
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    return ServedCertificate(config.ssl_certfile, config.ssl_keyfile)


def _journal(config: RouterConfig, keyring: Keyring) -> Journal:
    retention_s = config.tombstone_retention_s

    def limit(tenant: str) -> int:
        return keyring.limits_of(tenant).max_sessions or config.max_sessions_per_tenant

    if config.journal_url is not None:
        return RedisJournal(
            config.journal_url, config.journal_durability, max_sessions=limit, tombstone_retention_s=retention_s
        )
    return SqliteJournal(
        config.journal_path, config.journal_durability, max_sessions=limit, tombstone_retention_s=retention_s
    )


class RouterServer:
    """One router: its HTTP and gRPC servers, its journal, and the core between them."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        keyring = Keyring(config.api_keys, config.api_key_file)
        self._journal: Journal = _journal(config, keyring)
        self._certificate = _certificate(config)
        self._keeping: asyncio.Task[None] | None = None
        self._ports = (0, 0)
        self.core = RouterCore(config, self._journal, TextCodec(config.model), Metrics(), keyring)

    async def start(self, *, shares_ports: bool = False) -> tuple[int, int]:
        """Start to serve. Returns the HTTP and the gRPC port, which the system chooses if configured as 0.

        ``shares_ports``: they are those of a router that shares them (``share_ports``) and is to retire.
        """
        await self._journal.start()
        self.core.start()
        if shares_ports:  # the other one answers until then
            await self.core.fleet.wait_for_one(self.config.worker_wait_s)
        limits = {
            "grpc.max_receive_message_length": self.config.max_message_bytes,
            "grpc.max_concurrent_streams": MAX_STREAMS,
            "grpc.compression_enabled_algorithms_bitset": 1,  # none: a message is measured after it was unpacked
        }
        options = list((dict(SERVER_OPTIONS) | limits | {"grpc.so_reuseport": int(shares_ports)}).items())
        self._grpc = grpc.aio.server(options=options, interceptors=[Strangers(self.config.client_timeout_s)])
        session_pb2_grpc.add_SessionServiceServicer_to_server(SessionServer(self.core), self._grpc)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._grpc)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection(names, self._grpc)
        listener = listen(self.config.host, self.config.port, shared=shares_ports)
        try:
            grpc_port = self._listen_grpc(f"{self.config.host}:{self.config.grpc_port}")
        except RuntimeError:
            raise ConfigError(f"grpc_port: {self.config.grpc_port} of {self.config.host} cannot be bound") from None
        await self._grpc.start()
        await checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        app = http_app(self.core, lambda: f"{self.config.host}:{grpc_port}")
        self._batches = BatchRunner(self._journal, self.core.files, self.core.batches, inner_calls(app))
        self._batches.start()
        config = self.config
        settings = http_settings(app, config.client_timeout_s, config.max_connections, config.drain_timeout_s)
        settings.load()
        if self._certificate is not None:
            settings.ssl = self._certificate.context
            self._keeping = asyncio.create_task(self._certificate.keep())
        self._http = _HttpServer(settings)
        self._http_task = asyncio.create_task(self._http.serve(sockets=[listener]))
        while not self._http.started:
            await asyncio.sleep(0.01)
        self._ports = (listener.getsockname()[1], grpc_port)
        if shares_ports:
            self.share_ports(False)
        return self._ports

    def share_ports(self, shared: bool = True) -> None:
        """Let another router start on this one's ports, or no longer."""
        for port in self._ports:
            share_port(port, shared)

    def _listen_grpc(self, address: str) -> int:
        if self._certificate is None:
            return int(self._grpc.add_insecure_port(address))
        return int(self._grpc.add_secure_port(address, self._certificate.grpc_credentials()))

    async def set_workers(self, workers: list[WorkerAddress], epoch: int = 0) -> None:
        """See ``Fleet.set_workers``."""
        await self.core.fleet.set_workers(workers, epoch)

    async def stop(self) -> None:
        """Give live turns ``drain_timeout_s`` to end, then close everything."""
        self.core.live.closing = True
        await self._batches.stop()
        self._http.should_exit = True
        await asyncio.gather(
            self._http_task, self._grpc.stop(grace=self.config.drain_timeout_s), return_exceptions=True
        )
        await self._close()

    async def retire(self) -> None:
        """Take no connection any more, as another router serves on these ports; close when the last turn has ended.

        Idle connections are not cut, as their clients may just be sending: each has an answer more, or its time-out.
        """
        self.share_ports(False)  # from here on, new connections are the other's
        for server in self._http.servers:
            server.close()
        state, loop = self._http.server_state, asyncio.get_running_loop()
        self._http.config.encoded_headers.append(LAST)  # from uvicorn's next second on
        state.default_headers.append(LAST)
        ending = asyncio.create_task(self._grpc.stop(grace=self.config.turn_deadline_s))
        await self._batches.stop()
        deadline = loop.time() + self.config.turn_deadline_s
        while state.connections and loop.time() < deadline:
            await asyncio.sleep(RETIRE_POLL_S)
        await ending
        self._http.should_exit = True
        await asyncio.gather(self._http_task, return_exceptions=True)
        await self._close()

    async def _close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        await self.core.close()
        await self._journal.close()
