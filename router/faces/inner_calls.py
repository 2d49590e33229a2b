"""Calls of this router's own endpoints, in process: a batch's lines are answered as any request is."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from router.batches.run import Answer, Call
from router.faces.http import INNER_TENANT


def inner_calls(app: ASGIApp) -> Call:
    """Calls the application's endpoints for a tenant, without its key. Cancelling a call aborts its turn."""

    async def as_tenant(tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, INNER_TENANT: tenant}, receive, send)

    async def call(tenant: str, path: str, body: dict[str, Any]) -> Answer:
        transport = httpx.ASGITransport(partial(as_tenant, tenant), raise_app_exceptions=False)
        request = httpx.Request("POST", f"http://router{path}", json=body)
        response = await transport.handle_async_request(request)
        text = await response.aread()
        try:
            answer = json.loads(text)
        except ValueError:  # of an error inside the application
            answer = {"error": {"message": text.decode(errors="replace"), "type": "server_error"}}
        return Answer(response.status_code, answer)

    return call
