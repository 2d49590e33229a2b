"""OpenAI's HTTP API: responses and conversations."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, model_validator
from starlette.responses import Response

from holdfast.errors import HoldfastError, InvalidRequest, ModelNotFound
from holdfast.v1 import session_pb2
from router.fields import Count, Int64, OpenAIBody, Temperature, refuse_unsupported
from router.gateway import Gateway
from router.http_common import SSE, collect, first_chunk, tenant_of, until_disconnect
from router.responses import Responses, StoredResponse, output_items
from router.turns import TurnChunk

FIRST_DELTA = 4
"""Sequence number of the first token's event. A delta has that of its last token: so a cursor names a
token, whichever router counts."""
MAX_METADATA = 16
MAX_ITEMS = 20


class InputItem(BaseModel):
    """A message; other kinds of items are refused."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    id: str | None = None

    def stored(self) -> dict[str, Any]:
        kind = "output_text" if self.role == "assistant" else "input_text"
        parts: list[dict[str, Any]] = (
            [{"type": kind, "text": self.content}] if isinstance(self.content, str) else self.content
        )
        for part in parts:
            if part.get("type") not in ("input_text", "output_text", "text") or not isinstance(part.get("text"), str):
                raise InvalidRequest("input: only text content is supported")
        item_id = self.id or f"msg_{uuid.uuid4().hex}"
        return {"id": item_id, "type": "message", "role": self.role, "status": "completed", "content": parts}


class ConversationRef(BaseModel):
    id: str


class ResponseRequest(OpenAIBody):
    model: str = ""
    input: str | list[InputItem] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    max_output_tokens: Count | None = None
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: Int64 | None = None
    ignore_eos: bool = False
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)
    tools: list[Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> ResponseRequest:
        refuse_unsupported(
            {
                "tools": bool(self.tools),
                "include": bool(self.include),
                "text.format": (self.text or {}).get("format", {"type": "text"}) != {"type": "text"},
                "truncation: auto": self.truncation == "auto",
            }
        )
        if self.previous_response_id and self.conversation:
            raise ValueError("give one of previous_response_id and conversation")
        if self.background and not self.store:
            raise ValueError("a background response must be stored")
        return self

    def items(self) -> list[dict[str, Any]]:
        given = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return [item.stored() for item in given]

    def response(self, model: str) -> StoredResponse:
        response_id = f"resp_{uuid.uuid4().hex}"
        conversation = self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation
        sampling = session_pb2.Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=self.max_output_tokens,
            ignore_eos=self.ignore_eos,
        )
        told = {"temperature", "top_p", "max_output_tokens", "metadata"}
        return StoredResponse(
            id=response_id,
            created_at=int(time.time()),
            model=model,
            session_id=response_id,
            input=self.items(),
            instructions=self.instructions,
            previous_response_id=self.previous_response_id,
            conversation=conversation,
            background=self.background,
            stored=self.store,
            settings=self.model_dump(include=told),
            sampling=sampling.SerializeToString(),
        )


class ItemsRequest(BaseModel):
    items: list[InputItem] = Field(max_length=MAX_ITEMS)


class ConversationRequest(BaseModel):
    items: list[InputItem] | None = Field(None, max_length=MAX_ITEMS)
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA)


class MetadataRequest(BaseModel):
    metadata: dict[str, str] = Field(max_length=MAX_METADATA)


def responses_routes(gateway: Gateway) -> APIRouter:
    """The endpoints over a gateway."""
    routes = APIRouter()
    responses = Responses(gateway)

    def tenant(http: Request) -> str:
        return tenant_of(gateway.config.api_keys, http.headers.get("authorization"))

    # ---- responses ----------------------------------------------------------------------------------

    @routes.post("/v1/responses")
    async def create(http: Request, body: ResponseRequest) -> Any:
        served = gateway.config.served_model_name
        if body.model and body.model != served:
            raise ModelNotFound(f"model {body.model!r} is not served here; this is {served!r}")
        response = body.response(served)
        stream = await responses.create(response, tenant(http))
        if body.stream:
            first = await until_disconnect(http, first_chunk(stream))
            if isinstance(first, Response):
                return first
            return _streaming(_events(responses, response, tenant(http), _with_first(first, stream), -1))
        if body.background:
            return response_json(response)
        result = await until_disconnect(http, collect(stream))
        return result if isinstance(result, Response) else response_json(response)

    @routes.get("/v1/responses/{response_id}")
    async def retrieve(http: Request, response_id: str, stream: bool = False, starting_after: int = Query(-1)) -> Any:
        if not stream:
            return response_json(await responses.settled(response_id, tenant(http)))
        response = await responses.get(response_id, tenant(http))
        chunks = responses.follow(response_id, tenant(http), max(0, starting_after - FIRST_DELTA + 1))
        return _streaming(_events(responses, response, tenant(http), chunks, starting_after))

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel(http: Request, response_id: str) -> dict[str, Any]:
        return response_json(await responses.cancel(response_id, tenant(http)))

    @routes.delete("/v1/responses/{response_id}")
    async def delete(http: Request, response_id: str) -> dict[str, Any]:
        await responses.delete(response_id, tenant(http))
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        http: Request, response_id: str, limit: int = Query(20, ge=1, le=100), order: str = "desc", after: str = ""
    ) -> dict[str, Any]:
        response = await responses.get(response_id, tenant(http))
        return _page(response.input, limit, order, after)

    # ---- conversations ------------------------------------------------------------------------------

    async def conversation_json(http: Request, conversation_id: str) -> dict[str, Any]:
        found = await responses.conversations.get(conversation_id, tenant(http))
        return found.model_dump() | {"object": "conversation"}

    @routes.post("/v1/conversations")
    async def create_conversation(http: Request, body: ConversationRequest) -> dict[str, Any]:
        items = [item.stored() for item in body.items or []]
        made = await responses.conversations.create(tenant(http), body.metadata or {}, items)
        return await conversation_json(http, made)

    @routes.get("/v1/conversations/{conversation_id}")
    async def get_conversation(http: Request, conversation_id: str) -> dict[str, Any]:
        return await conversation_json(http, conversation_id)

    @routes.post("/v1/conversations/{conversation_id}")
    async def update_conversation(http: Request, conversation_id: str, body: MetadataRequest) -> dict[str, Any]:
        conversation = await responses.conversations.get(conversation_id, tenant(http))
        conversation.metadata = body.metadata
        await responses.conversations.update(conversation, tenant(http))
        return await conversation_json(http, conversation_id)

    @routes.delete("/v1/conversations/{conversation_id}")
    async def delete_conversation(http: Request, conversation_id: str) -> dict[str, Any]:
        await responses.conversations.delete(conversation_id, tenant(http))
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @routes.get("/v1/conversations/{conversation_id}/items")
    async def list_items(
        http: Request, conversation_id: str, limit: int = Query(20, ge=1, le=100), order: str = "desc", after: str = ""
    ) -> dict[str, Any]:
        await responses.conversations.get(conversation_id, tenant(http))
        items = [item for _, item in await responses.conversations.items(conversation_id, tenant(http))]
        return _page(items, limit, order, after)

    @routes.post("/v1/conversations/{conversation_id}/items")
    async def add_items(http: Request, conversation_id: str, body: ItemsRequest) -> dict[str, Any]:
        await responses.conversations.get(conversation_id, tenant(http))
        items = [item.stored() for item in body.items]
        await responses.conversations.add_items(conversation_id, tenant(http), items)
        return _page(items, MAX_ITEMS, "asc", "")

    @routes.get("/v1/conversations/{conversation_id}/items/{item_id}")
    async def get_item(http: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
        return await responses.conversations.item(conversation_id, tenant(http), item_id)

    @routes.delete("/v1/conversations/{conversation_id}/items/{item_id}")
    async def delete_item(http: Request, conversation_id: str, item_id: str) -> dict[str, Any]:
        await responses.conversations.delete_item(conversation_id, tenant(http), item_id)
        return await conversation_json(http, conversation_id)

    return routes


# ---- output --------------------------------------------------------------------------------------


def response_json(response: StoredResponse) -> dict[str, Any]:
    """A response in OpenAI's shape."""
    reason = {"reason": "max_output_tokens"} if response.status == "incomplete" else None
    return {
        "id": response.id,
        "object": "response",
        "created_at": response.created_at,
        "status": response.status,
        "background": response.background,
        "error": response.error,
        "incomplete_details": reason,
        "instructions": response.instructions,
        "model": response.model,
        "output": output_items(response),
        "parallel_tool_calls": False,
        "previous_response_id": response.previous_response_id,
        "conversation": {"id": response.conversation} if response.conversation else None,
        "store": response.stored,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none",
        "tools": [],
        "truncation": "disabled",
        "usage": response.usage,
        **response.settings,
    }


def _page(items: list[dict[str, Any]], limit: int, order: str, after: str) -> dict[str, Any]:
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: must be asc or desc")
    ordered = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    if after and after not in ids:
        raise InvalidRequest(f"after: there is no item {after}")
    rest = ordered[ids.index(after) + 1 :] if after else ordered
    shown = rest[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(rest) > limit,
    }


def _streaming(events: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(events, media_type=SSE, headers={"Cache-Control": "no-cache"})


async def _with_first(first: TurnChunk, rest: AsyncIterator[TurnChunk]) -> AsyncIterator[TurnChunk]:
    """The stream again, of which the first chunk was taken to see that it begins."""
    try:
        yield first
        async for chunk in rest:
            yield chunk
    finally:
        await rest.aclose()  # type: ignore[attr-defined]


async def _events(
    responses: Responses, response: StoredResponse, tenant: str, chunks: AsyncIterator[TurnChunk], after: int
) -> AsyncIterator[bytes]:
    """The response's events whose sequence numbers are greater than ``after``."""
    item = {"id": response.message_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
    part = {"type": "output_text", "text": "", "annotations": []}
    place = {"item_id": response.message_id, "output_index": 0, "content_index": 0}
    begun = response_json(response) | {"status": "in_progress", "output": [], "usage": None}

    def event(number: int, kind: str, **body: Any) -> bytes:
        if number <= after:
            return b""
        data = json.dumps({"type": f"response.{kind}", "sequence_number": number} | body, separators=(",", ":"))
        return f"event: response.{kind}\ndata: {data}\n\n".encode()

    number = FIRST_DELTA
    try:
        yield event(0, "created", response=begun)
        yield event(1, "in_progress", response=begun)
        yield event(2, "output_item.added", output_index=0, item=item)
        yield event(3, "content_part.added", **place, part=part)
        async for chunk in chunks:
            number = max(number, FIRST_DELTA + chunk.index + len(chunk.tokens))
            if chunk.text:
                yield event(number - 1, "output_text.delta", **place, delta=chunk.text, logprobs=[])
        if response.stored:
            response = await responses.get(response.id, tenant)
        if response.status in ("completed", "incomplete"):
            whole = output_items(response)[0]
            yield event(number, "output_text.done", **place, text=response.text, logprobs=[])
            yield event(number + 1, "content_part.done", **place, part=whole["content"][0])
            yield event(number + 2, "output_item.done", output_index=0, item=whole)
        yield event(number + 3, response.status, response=response_json(response))
    except HoldfastError as error:
        body = {"code": error.code, "message": error.message, "param": None}
        data = json.dumps({"type": "error", "sequence_number": number + 3} | body)
        yield f"event: error\ndata: {data}\n\n".encode()
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]
