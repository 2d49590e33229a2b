"""``/v1/conversations``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from router.faces.http import Tenant
from router.faces.openai.conversations import Conversations
from router.faces.openai.pages import page_of
from router.faces.openai.response_body import MAX_METADATA, Item

MAX_ITEMS = 20


class ItemsBody(BaseModel):
    items: list[Item] = Field(max_length=MAX_ITEMS)


class ConversationBody(BaseModel):
    items: list[Item] | None = Field(None, max_length=MAX_ITEMS)
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)


class MetadataBody(BaseModel):
    metadata: dict[str, str] = Field(max_length=MAX_METADATA)


def conversation_routes(conversations: Conversations) -> APIRouter:
    """The endpoints over the router's conversations."""
    routes = APIRouter()

    async def conversation_json(tenant: str, conversation_id: str) -> dict[str, Any]:
        found = await conversations.get(conversation_id, tenant)
        return found.model_dump() | {"object": "conversation"}

    @routes.post("/v1/conversations")
    async def create_conversation(tenant: Tenant, body: ConversationBody) -> dict[str, Any]:
        items = [item.stored() for item in body.items or []]
        created = await conversations.create(tenant, body.metadata or {}, items)
        return await conversation_json(tenant, created)

    @routes.get("/v1/conversations/{conversation_id}")
    async def get_conversation(tenant: Tenant, conversation_id: str) -> dict[str, Any]:
        return await conversation_json(tenant, conversation_id)

    @routes.post("/v1/conversations/{conversation_id}")
    async def update_conversation(tenant: Tenant, conversation_id: str, body: MetadataBody) -> dict[str, Any]:
        conversation = await conversations.get(conversation_id, tenant)
        conversation.metadata = body.metadata
        await conversations.update(conversation, tenant)
        return await conversation_json(tenant, conversation_id)

    @routes.delete("/v1/conversations/{conversation_id}")
    async def delete_conversation(tenant: Tenant, conversation_id: str) -> dict[str, Any]:
        await conversations.delete(conversation_id, tenant)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @routes.get("/v1/conversations/{conversation_id}/items")
    async def list_items(
        tenant: Tenant, conversation_id: str, limit: int = Query(20, ge=1, le=100), order: str = "desc", after: str = ""
    ) -> dict[str, Any]:
        await conversations.get(conversation_id, tenant)
        items = [item for _, item in await conversations.items(conversation_id, tenant)]
        return page_of(items, limit, order, after)

    @routes.post("/v1/conversations/{conversation_id}/items")
    async def add_items(tenant: Tenant, conversation_id: str, body: ItemsBody) -> dict[str, Any]:
        await conversations.get(conversation_id, tenant)
        items = [item.stored() for item in body.items]
        await conversations.add_items(conversation_id, tenant, items)
        return page_of(items, MAX_ITEMS, "asc", "")

    @routes.get("/v1/conversations/{conversation_id}/items/{item_id}")
    async def get_item(tenant: Tenant, conversation_id: str, item_id: str) -> dict[str, Any]:
        return await conversations.item(conversation_id, tenant, item_id)

    @routes.delete("/v1/conversations/{conversation_id}/items/{item_id}")
    async def delete_item(tenant: Tenant, conversation_id: str, item_id: str) -> dict[str, Any]:
        await conversations.delete_item(conversation_id, tenant, item_id)
        return await conversation_json(tenant, conversation_id)

    return routes
