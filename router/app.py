"""A router's process: the HTTP app, the gRPC server, and the gateway under both."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import uvicorn
from fastapi import Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from holdfast.errors import ConfigError, HoldfastError, InvalidRequest, NoWorkerAvailable
from holdfast.v1 import session_pb2_grpc
from holdfast.wire import SERVER_OPTIONS
from router.config import RouterConfig
from router.fields import refuse_what_is_no_text
from router.gateway import Gateway
from router.grpc_api import SessionServer
from router.http_common import LimitedBody, error_response, tenant_of
from router.journal import Journal
from router.metrics import Metrics
from router.openai_api import openai_routes
from router.redis_journal import RedisJournal
from router.responses_api import responses_routes
from router.sglang_api import sglang_routes
from router.sqlite_journal import SqliteJournal
from router.text import TextCodec
from router.workers import WorkerAddress, WorkerLink

SERVICE = "holdfast.v1.SessionService"
OPEN_PATHS = ("/health", "/metrics")
"""What load balancers and Prometheus ask for comes without a key."""


def http_app(gateway: Gateway, grpc_address: Callable[[], str]) -> FastAPI:
    """All HTTP endpoints over a gateway. ``grpc_address``: where this router's gRPC is."""

    def authenticate(request: Request) -> None:
        if request.url.path not in OPEN_PATHS:
            tenant_of(gateway.config.api_keys, request.headers.get("authorization"))

    dependencies = [Depends(authenticate), Depends(refuse_what_is_no_text)]
    app = FastAPI(title="Holdfast", docs_url=None, redoc_url=None, dependencies=dependencies)
    app.add_middleware(LimitedBody, max_bytes=gateway.config.max_message_bytes)
    app.include_router(openai_routes(gateway))
    app.include_router(responses_routes(gateway))
    app.include_router(sglang_routes(gateway))

    @app.exception_handler(HoldfastError)
    async def holdfast_error(request: Request, error: HoldfastError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if part != "body")
        return error_response(InvalidRequest(f"{param or 'request'}: {first['msg']}"), param or None)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        body = {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": body}, error.status_code)

    @app.get("/health")
    async def healthy() -> Response:
        return Response(status_code=200 if gateway.alive_links() else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(gateway.metrics.render(), media_type="text/plain; version=0.0.4")

    # What the command line asks for.
    @app.get("/holdfast/workers")
    async def workers() -> list[dict[str, Any]]:
        return await _ask_all(gateway, WorkerLink.fetch_stats)

    @app.get("/holdfast/sessions")
    async def sessions(request: Request) -> list[dict[str, Any]]:
        tenant = tenant_of(gateway.config.api_keys, request.headers.get("authorization"))
        return [
            {
                "session_id": record.session_id,
                "worker": record.worker,
                "epoch": record.epoch,
                "num_tokens": length,
                "num_turns": record.num_turns,
                "busy": busy,
            }
            for record, length, busy in await gateway.journal.list_sessions(tenant)
        ]

    @app.delete("/holdfast/sessions/{session_id}")
    async def release(request: Request, session_id: str) -> dict[str, Any]:
        tenant = tenant_of(gateway.config.api_keys, request.headers.get("authorization"))
        return {"session_id": session_id, "pages_freed": await gateway.control.release(session_id, tenant)}

    @app.get("/holdfast/router")
    async def router() -> dict[str, Any]:
        return {"pid": os.getpid(), "grpc": grpc_address(), "live_turns": len(gateway.live_turns())}

    @app.post("/holdfast/workers/{worker_id}/drain")
    async def drain(worker_id: str, timeout_s: float = Query(30.0, ge=0), stop: bool = False) -> dict[str, Any]:
        return {"worker_id": worker_id, **await gateway.moves.drain(worker_id, timeout_s, stop=stop)}

    @app.get("/holdfast/audit")
    async def audit() -> list[dict[str, Any]]:
        return await _ask_all(gateway, WorkerLink.audit)

    return app


async def _ask_all(gateway: Gateway, ask: Callable[[WorkerLink, float], Awaitable[Message]]) -> list[dict[str, Any]]:
    """What every live worker answers; who dies while it is asked is not live."""

    async def one(link: WorkerLink) -> Message | None:
        try:
            return await ask(link, gateway.config.control_timeout_s)
        except NoWorkerAvailable:
            return None

    answers = await asyncio.gather(*(one(link) for link in gateway.alive_links()))
    return [_as_dict(answer) for answer in answers if answer is not None]


def _as_dict(message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


class _HttpServer(uvicorn.Server):
    """Signals are the process's own business: several servers live in it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """The HTTP port, bound before anything starts: uvicorn would end the process if it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio switches Nagle's delay off only where it reads TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"port: {port} of {host} cannot be bound: {error.strerror}") from None
    return listener


def _journal(config: RouterConfig) -> Journal:
    limit, retention_s = config.max_sessions_per_tenant, config.tombstone_retention_s
    if config.journal_url is not None:
        return RedisJournal(
            config.journal_url, config.journal_durability, max_sessions=limit, tombstone_retention_s=retention_s
        )
    return SqliteJournal(
        config.journal_path, config.journal_durability, max_sessions=limit, tombstone_retention_s=retention_s
    )


class RouterServer:
    """One router. ``start`` serves, ``set_workers`` tells it whom to use, ``stop`` ends it."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._journal: Journal = _journal(config)
        metrics = Metrics()
        self.gateway = Gateway(config, self._journal, TextCodec(config.model), metrics)
        metrics.watch_gateway(
            lambda: [link.stats for link in self.gateway.alive_links()],
            lambda: len(self.gateway.live_turns()),
            lambda: len(self.gateway.sessions),
        )

    async def start(self) -> tuple[int, int]:
        """Serve; returns the HTTP and the gRPC port (which the config may leave to the system, as 0)."""
        await self._journal.start()
        limit = ("grpc.max_receive_message_length", self.config.max_message_bytes)
        self._grpc = grpc.aio.server(options=list((dict(SERVER_OPTIONS) | dict([limit])).items()))
        session_pb2_grpc.add_SessionServiceServicer_to_server(SessionServer(self.gateway), self._grpc)
        checks = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, self._grpc)
        names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection(names, self._grpc)
        listener = _listen(self.config.host, self.config.port)
        try:
            grpc_port = self._grpc.add_insecure_port(f"{self.config.host}:{self.config.grpc_port}")
        except RuntimeError:
            raise ConfigError(f"grpc_port: {self.config.grpc_port} of {self.config.host} cannot be bound") from None
        await self._grpc.start()
        await checks.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        settings = uvicorn.Config(
            http_app(self.gateway, lambda: f"{self.config.host}:{grpc_port}"),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=round(self.config.drain_timeout_s),
            lifespan="off",
        )
        self._http = _HttpServer(settings)
        self._http_task = asyncio.create_task(self._http.serve(sockets=[listener]))
        while not self._http.started:
            await asyncio.sleep(0.01)
        return listener.getsockname()[1], grpc_port

    async def set_workers(self, workers: list[WorkerAddress]) -> None:
        await self.gateway.set_workers(workers)

    async def stop(self) -> None:
        """Let live turns end for ``drain_timeout_s``, then close everything."""
        self.gateway.closing = True
        self._http.should_exit = True
        await asyncio.gather(
            self._http_task, self._grpc.stop(grace=self.config.drain_timeout_s), return_exceptions=True
        )
        await self.gateway.close()
        await self._journal.close()
