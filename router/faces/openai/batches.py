"""``/v1/batches``."""

from __future__ import annotations

import re
from typing import Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from holdfast.errors import InvalidRequest
from router.batches.files import KEEP_S
from router.batches.lines import ENDPOINTS
from router.core import RouterCore
from router.faces.fields import OpenAIBody
from router.faces.http import Tenant
from router.faces.openai.files import MIN_KEEP_S
from router.faces.openai.pages import page_of
from router.faces.openai.response_body import MAX_METADATA

SECONDS = {"m": 60, "h": 3600, "d": 24 * 3600}
MAX_WINDOW_S = 30 * 24 * 3600


class ExpiresAfter(BaseModel):
    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(ge=MIN_KEEP_S, le=KEEP_S)


class CreateBatchBody(OpenAIBody):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    output_expires_after: ExpiresAfter | None = None

    def window_s(self) -> int:
        """Raises InvalidRequest."""
        found = re.fullmatch(r"([1-9]\d{0,4})([mhd])", self.completion_window)
        seconds = int(found[1]) * SECONDS[found[2]] if found else 0
        if not 0 < seconds <= MAX_WINDOW_S:
            raise InvalidRequest("completion_window: must be like 24h, at most 30d", "completion_window")
        return seconds


def batch_routes(core: RouterCore) -> APIRouter:
    """The endpoints over a router's batches."""
    routes = APIRouter()
    batches = core.batches

    @routes.post("/v1/batches")
    async def create(tenant: Tenant, body: CreateBatchBody) -> dict[str, Any]:
        if body.endpoint not in ENDPOINTS:
            raise InvalidRequest(f"endpoint: must be one of {', '.join(ENDPOINTS)}", "endpoint")
        window_s, keep = body.window_s(), body.output_expires_after
        batch = await batches.create(
            tenant,
            core.config.served_model_name,
            body.endpoint,
            await core.files.get(body.input_file_id, tenant),
            body.completion_window,
            window_s,
            body.metadata,
            keep.seconds if keep is not None else KEEP_S,
        )
        return batch.shown()

    @routes.get("/v1/batches")
    async def list_batches(tenant: Tenant, limit: int = Query(20, ge=1, le=100), after: str = "") -> dict[str, Any]:
        return page_of([batch.shown() for batch in await batches.list(tenant)], limit, "desc", after)

    @routes.get("/v1/batches/{batch_id}")
    async def retrieve(tenant: Tenant, batch_id: str) -> dict[str, Any]:
        return (await batches.get(batch_id, tenant)).shown()

    @routes.post("/v1/batches/{batch_id}/cancel")
    async def cancel(tenant: Tenant, batch_id: str) -> dict[str, Any]:
        return (await batches.cancel(batch_id, tenant)).shown()

    return routes
