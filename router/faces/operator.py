"""Endpoints for operators: health, metrics, and what the ``holdfast`` command calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Query
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.responses import JSONResponse, Response

from holdfast.errors import NoWorkerAvailable
from router.core import RouterCore
from router.faces.http import Tenant
from router.fleet.link import WorkerLink


def operator_routes(core: RouterCore, grpc_address: Callable[[], str]) -> APIRouter:
    """The endpoints over a router. ``grpc_address``: of this router's gRPC server."""
    routes = APIRouter()

    @routes.get("/health")
    async def healthy() -> Response:
        """200 while there is a worker, also where what is dead would not be started again."""
        if not core.fleet.alive():
            return JSONResponse({"status": "no worker"}, 503)
        degraded = core.control_plane.degraded
        return JSONResponse({"status": "degraded", "reason": degraded} if degraded else {"status": "ok"})

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(core.metrics.render(), media_type="text/plain; version=0.0.4")

    @routes.get("/holdfast/workers")
    async def workers() -> list[dict[str, Any]]:
        return await _call_all(core, WorkerLink.fetch_stats)

    @routes.get("/holdfast/audit")
    async def audit() -> list[dict[str, Any]]:
        return await _call_all(core, WorkerLink.audit)

    @routes.post("/holdfast/workers/{worker_id}/drain")
    async def drain(worker_id: str, timeout_s: float = Query(30.0, ge=0), stop: bool = False) -> dict[str, Any]:
        return {"worker_id": worker_id, **await core.migrator.drain(worker_id, timeout_s, stop=stop)}

    @routes.get("/holdfast/router")
    async def router() -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "grpc": grpc_address(),
            "live_turns": len(core.live),
            "control_plane": core.control_plane.address,
            "degraded": core.control_plane.degraded,
            "recomputed_tokens": core.metrics.recomputed_by_reason(),
        }

    @routes.get("/holdfast/sessions")
    async def sessions(tenant: Tenant) -> list[dict[str, Any]]:
        return [
            {
                "session_id": record.shown_id,
                "worker": record.worker,
                "epoch": record.epoch,
                "num_tokens": length,
                "num_turns": record.num_turns,
                "busy": busy,
            }
            for record, length, busy in await core.journal.list_sessions(tenant)
        ]

    @routes.delete("/holdfast/sessions/{session_id}")
    async def release(tenant: Tenant, session_id: str) -> dict[str, Any]:
        return {"session_id": session_id, "pages_freed": await core.control.release(session_id, tenant)}

    return routes


async def _call_all(core: RouterCore, call: Callable[[WorkerLink, float], Awaitable[Message]]) -> list[dict[str, Any]]:
    """The answers of all living workers. One that is lost during its call is left out."""

    async def one(link: WorkerLink) -> Message | None:
        try:
            return await call(link, core.config.control_timeout_s)
        except NoWorkerAvailable:
            return None

    answers = await asyncio.gather(*(one(link) for link in core.fleet.alive()))
    return [_as_dict(answer) for answer in answers if answer is not None]


def _as_dict(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields
