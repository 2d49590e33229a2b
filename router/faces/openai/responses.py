"""``/v1/responses``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from router.core import RouterCore
from router.faces.http import Tenant, collect, event_stream, first_chunk, until_disconnect, with_first
from router.faces.openai.generation import check_model
from router.faces.openai.pages import page_of
from router.faces.openai.response_body import ResponseBody
from router.faces.openai.response_events import response_events, response_json
from router.faces.openai.response_turns import ResponseTurns


def response_routes(core: RouterCore, responses: ResponseTurns) -> APIRouter:
    """The endpoints over a router."""
    routes = APIRouter()

    @routes.post("/v1/responses")
    async def create(http: Request, tenant: Tenant, body: ResponseBody) -> Any:
        check_model(core, body.model)
        response = body.response(core.config.served_model_name)
        stream = await responses.create(response, tenant)
        if body.stream:
            first = await until_disconnect(http, first_chunk(stream))
            if isinstance(first, Response):
                return first
            return event_stream(response_events(core, responses, response, tenant, with_first(first, stream), -1))
        if body.background:
            return response_json(response) | {"status": "queued"}
        result = await until_disconnect(http, collect(stream))
        return result if isinstance(result, Response) else response_json(response)

    @routes.post("/v1/responses/input_tokens")
    async def count(tenant: Tenant, body: ResponseBody) -> dict[str, Any]:
        check_model(core, body.model)
        response = body.response(core.config.served_model_name)
        return {
            "object": "response.input_tokens",
            "input_tokens": await responses.num_input_tokens(response, tenant),
        }

    @routes.get("/v1/responses/{response_id}")
    async def retrieve(tenant: Tenant, response_id: str, stream: bool = False, starting_after: int = Query(-1)) -> Any:
        if not stream:
            return response_json(await responses.settled(response_id, tenant))
        response = await responses.get(response_id, tenant)
        chunks = responses.follow(response_id, tenant)
        return event_stream(response_events(core, responses, response, tenant, chunks, starting_after))

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel(tenant: Tenant, response_id: str) -> dict[str, Any]:
        return response_json(await responses.cancel(response_id, tenant))

    @routes.delete("/v1/responses/{response_id}")
    async def delete(tenant: Tenant, response_id: str) -> dict[str, Any]:
        await responses.delete(response_id, tenant)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        tenant: Tenant, response_id: str, limit: int = Query(20, ge=1, le=100), order: str = "desc", after: str = ""
    ) -> dict[str, Any]:
        response = await responses.get(response_id, tenant)
        return page_of(response.input, limit, order, after)

    return routes
