"""Conversations of OpenAI's API: a session each, and a list of items, in the journal one by one."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, TypeAdapter

from holdfast.errors import InvalidRequest, ResponseNotFound, SessionNotFound
from router.gateway import Gateway

_ITEM = TypeAdapter(dict[str, Any])


class StoredConversation(BaseModel):
    """A conversation as the journal keeps it; its items are kept one by one beside it."""

    id: str
    created_at: int
    metadata: dict[str, str] = {}


class Conversations:
    """Makes, finds and edits conversations. The journal is shared by all routers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._journal = gateway.journal

    async def create(self, tenant: str, metadata: dict[str, str], items: list[dict[str, Any]]) -> str:
        """Its id. Raises TooManySessions: its session is open from now on."""
        conversation_id = f"conv_{uuid.uuid4().hex}"
        await self._gateway.control.open_session(conversation_id, tenant)
        body = StoredConversation(id=conversation_id, created_at=int(time.time()), metadata=metadata)
        objects = {f"conversation/{conversation_id}": body.model_dump_json().encode()}
        await self._journal.put_objects(tenant, objects | item_objects(conversation_id, 0, items))
        return conversation_id

    async def get(self, conversation_id: str, tenant: str) -> StoredConversation:
        """Raises ResponseNotFound."""
        found = await self._journal.get_object(tenant, f"conversation/{conversation_id}")
        if found is None:
            raise ResponseNotFound(f"conversation {conversation_id} does not exist")
        return StoredConversation.model_validate_json(found)

    async def update(self, conversation: StoredConversation, tenant: str) -> None:
        key = f"conversation/{conversation.id}"
        await self._journal.put_objects(tenant, {key: conversation.model_dump_json().encode()})

    async def delete(self, conversation_id: str, tenant: str) -> None:
        """With its items and its session."""
        await self.get(conversation_id, tenant)
        keys = [key for key, _ in await self._journal.list_objects(tenant, f"items/{conversation_id}/")]
        await self._journal.delete_objects(tenant, [f"conversation/{conversation_id}", *keys])
        await release_session(self._gateway, conversation_id, tenant)

    async def items(self, conversation_id: str, tenant: str) -> list[tuple[int, dict[str, Any]]]:
        """With their numbers, in order."""
        found = await self._journal.list_objects(tenant, f"items/{conversation_id}/")
        return [(int(key.rpartition("/")[2]), _ITEM.validate_json(value)) for key, value in found]

    async def add_items(self, conversation_id: str, tenant: str, items: list[dict[str, Any]]) -> None:
        """Raises InvalidRequest if they are more than the model takes tokens: nothing could go on from them."""
        known, limit = await self.items(conversation_id, tenant), self._gateway.context_len
        if 0 < limit < len(known) + len(items):
            raise InvalidRequest(f"conversation {conversation_id} has {len(known)} items, it may have {limit} at most")
        first = 1 + max((number for number, _ in known), default=-1)
        await self._journal.put_objects(tenant, item_objects(conversation_id, first, items))

    async def item(self, conversation_id: str, tenant: str, item_id: str) -> dict[str, Any]:
        """Raises ResponseNotFound."""
        for _, item in await self.items(conversation_id, tenant):
            if item["id"] == item_id:
                return item
        raise ResponseNotFound(f"item {item_id} does not exist in conversation {conversation_id}")

    async def delete_item(self, conversation_id: str, tenant: str, item_id: str) -> None:
        """What comes after it is computed again at the next turn, as with any edited history."""
        for number, item in await self.items(conversation_id, tenant):
            if item["id"] == item_id:
                await self._journal.delete_objects(tenant, [_item_key(conversation_id, number)])
                return
        raise ResponseNotFound(f"item {item_id} does not exist in conversation {conversation_id}")


def item_objects(conversation_id: str, first: int, items: list[dict[str, Any]]) -> dict[str, bytes]:
    """Items of a conversation, numbered from ``first`` on, as the journal keeps them."""
    return {_item_key(conversation_id, number): _ITEM.dump_json(item) for number, item in enumerate(items, first)}


def _item_key(conversation_id: str, number: int) -> str:
    return f"items/{conversation_id}/{number:012d}"


async def release_session(gateway: Gateway, session_id: str, tenant: str) -> None:
    """The session of a conversation or of responses, with what points to it."""
    await gateway.journal.delete_objects(tenant, [f"head/{session_id}"])
    with suppress(SessionNotFound):  # it may never have had a turn
        await gateway.control.release(session_id, tenant)
