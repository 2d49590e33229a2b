"""Conversations of OpenAI's API: each has a session, and a list of items that are stored one by one."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, TypeAdapter

from holdfast.errors import InvalidRequest, ResponseNotFound, SessionNotFound
from router.core import RouterCore

_ITEM = TypeAdapter(dict[str, Any])


class StoredConversation(BaseModel):
    """A conversation as the journal stores it, without its items."""

    id: str
    created_at: int
    metadata: dict[str, str] = {}


class Conversations:
    """Creates, finds and edits conversations. The journal is shared by all routers."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._journal = core.journal

    async def create(self, tenant: str, metadata: dict[str, str], items: list[dict[str, Any]]) -> str:
        """Open a conversation and its session. Returns its id. Raises TooManySessions."""
        conversation_id = f"conv_{uuid.uuid4().hex}"
        await self._core.control.open_session(conversation_id, tenant)
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
        """Delete a conversation with its items, and release its session."""
        await self.get(conversation_id, tenant)
        keys = [key for key, _ in await self._journal.list_objects(tenant, f"items/{conversation_id}/")]
        await self._journal.delete_objects(tenant, [f"conversation/{conversation_id}", *keys])
        await release_session(self._core, conversation_id, tenant)

    async def items(self, conversation_id: str, tenant: str) -> list[tuple[int, dict[str, Any]]]:
        """The items with their numbers, in order."""
        found = await self._journal.list_objects(tenant, f"items/{conversation_id}/")
        return [(int(key.rpartition("/")[2]), _ITEM.validate_json(value)) for key, value in found]

    async def add_items(self, conversation_id: str, tenant: str, items: list[dict[str, Any]]) -> None:
        """Add items. Raises InvalidRequest if there are more items than tokens in the context."""
        known, limit = await self.items(conversation_id, tenant), self._core.fleet.context_len
        if 0 < limit < len(known) + len(items):
            raise InvalidRequest(f"conversation {conversation_id} has {len(known)} items; it may have at most {limit}")
        first = 1 + max((number for number, _ in known), default=-1)
        await self._journal.put_objects(tenant, item_objects(conversation_id, first, items))

    async def item(self, conversation_id: str, tenant: str, item_id: str) -> dict[str, Any]:
        """Raises ResponseNotFound."""
        for _, item in await self.items(conversation_id, tenant):
            if item["id"] == item_id:
                return item
        raise ResponseNotFound(f"item {item_id} does not exist in conversation {conversation_id}")

    async def delete_item(self, conversation_id: str, tenant: str, item_id: str) -> None:
        """Delete an item. The next turn computes what follows it again, as for any edited history."""
        for number, item in await self.items(conversation_id, tenant):
            if item["id"] == item_id:
                await self._journal.delete_objects(tenant, [_item_key(conversation_id, number)])
                return
        raise ResponseNotFound(f"item {item_id} does not exist in conversation {conversation_id}")


def item_objects(conversation_id: str, first: int, items: list[dict[str, Any]]) -> dict[str, bytes]:
    """Objects that store a conversation's items, numbered from ``first`` on."""
    return {_item_key(conversation_id, number): _ITEM.dump_json(item) for number, item in enumerate(items, first)}


def _item_key(conversation_id: str, number: int) -> str:
    return f"items/{conversation_id}/{number:012d}"


async def release_session(core: RouterCore, session_id: str, tenant: str) -> None:
    """Release the session of a conversation or of responses, and the record of its last response."""
    await core.journal.delete_objects(tenant, [f"head/{session_id}"])
    with suppress(SessionNotFound):  # it may never have had a turn
        await core.control.release(session_id, tenant)
