"""Responses and conversations: what OpenAI's newer API remembers, kept in the journal, each on a session.

A response is one turn. With ``previous_response_id`` it goes on with the session of that response if
that was its last, else with a fork of it: copy-on-write KV, no recompute. A conversation is one
session, and a list of items that its responses add to.

What a response says is the journal's turn until it ends; then it is written into the response, so
that whoever asks later, at whichever router, gets it from there.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel

from holdfast.errors import (
    DeadlineExceeded,
    HoldfastError,
    InvalidRequest,
    ResponseNotFound,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    TurnNotFound,
)
from holdfast.v1 import session_pb2
from router.conversations import Conversations, item_objects, release_session
from router.gateway import Gateway
from router.inputs import prepare_text
from router.sessions import Session
from router.turns import TurnChunk, TurnRequest

CANCEL_POLL_S = 0.5
"""Between looks at whether somebody wants a background response to end."""
FOLLOW_POLL_S = 0.1
"""Between looks at a response that another router runs."""
MAX_HISTORIES = 256
"""Conversations so far, kept so that a response's history is not read link by link."""


class StoredResponse(BaseModel):
    """A response as the journal keeps it. ``output``: token ids, and their text, once it has ended."""

    id: str
    created_at: int
    model: str
    session_id: str
    input: list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | None = None
    first_item: int = 0
    """Where its items begin in its conversation."""
    background: bool = False
    stored: bool = True
    saved: bool = False
    """The journal has it: refused requests leave nothing there."""
    settings: dict[str, Any] = {}
    """What is only told back: temperature, metadata and the like."""
    sampling: bytes = b""
    status: str = "in_progress"
    output: list[int] = []
    text: str = ""
    finish: str = ""
    usage: dict[str, Any] | None = None
    error: dict[str, str] | None = None

    model_config = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}

    @property
    def message_id(self) -> str:
        return "msg_" + self.id.removeprefix("resp_")

    @property
    def ended(self) -> bool:
        return self.status != "in_progress"


class _MovedOn(InvalidRequest):
    """The session has gone on from the response that this one wants to go on from."""


class _Run:
    """A background response under way here: what it gave so far, for all who follow it."""

    def __init__(self) -> None:
        self.chunks: list[TurnChunk] = []
        self.error: HoldfastError | None = None
        self.done = False
        self._news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def follow(self) -> AsyncIterator[TurnChunk]:
        at = 0
        while True:
            for chunk in self.chunks[at:]:
                yield chunk
                at += 1
            if at < len(self.chunks):
                continue
            if self.error is not None:
                raise self.error
            if self.done:
                return
            await self._news.wait()


class Responses:
    """Runs, keeps and finds responses. One per router; the journal is shared."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._journal = gateway.journal
        self.conversations = Conversations(gateway)
        self._runs: dict[str, _Run] = {}
        self._histories: OrderedDict[tuple[str, str], list[dict[str, Any]]] = OrderedDict()

    # ---- to make one ----------------------------------------------------------------------------------

    async def create(self, response: StoredResponse, tenant: str) -> AsyncIterator[TurnChunk]:
        """Begin a response and give its chunks; in the background, whether anybody takes them or not."""
        if response.background:
            await self._save(response, tenant)
            return self._in_background(response, tenant).follow()
        return self._run(response, tenant)

    def _in_background(self, response: StoredResponse, tenant: str, resumed: bool = False) -> _Run:
        run = self._runs[response.id] = _Run()

        async def work() -> None:
            watch = asyncio.create_task(self._watch_cancel(response.id, tenant))
            try:
                chunks = self._resume(response, tenant) if resumed else self._run(response, tenant)
                async for chunk in chunks:
                    run.chunks.append(chunk)
                    run.tell()
            except HoldfastError as error:
                run.error = error
            finally:
                watch.cancel()
                self._runs.pop(response.id, None)
                run.done = True
                run.tell()

        run.task = asyncio.create_task(work())
        return run

    async def _run(self, response: StoredResponse, tenant: str) -> AsyncIterator[TurnChunk]:
        """The response's turn. Closing this early, as when its client leaves, aborts it."""
        told = response.background
        try:
            session_id = await self._session_of(response, tenant)
            while True:
                request = TurnRequest(
                    tenant=tenant,
                    prepare=lambda session: self._prepare(response, tenant, session),
                    sampling=session_pb2.Sampling.FromString(response.sampling),
                    session_id=session_id if response.stored else "",
                    queue=response.conversation is None,
                    turn_id=response.id,
                    rolled_back=partial(self._cancelled, response, tenant),
                )
                response.session_id = session_id
                if response.stored:
                    await self._save(response, tenant)
                try:
                    async for chunk in self._finishing(response, tenant, self._gateway.run(request)):
                        told = True
                        yield chunk
                    return
                except _MovedOn:
                    session_id = await self._fork(response, tenant)
        except HoldfastError as error:
            if not response.output:  # else its turn was left open, and goes on when somebody asks for it
                await self._fail(response, tenant, error, told=told)
            raise

    async def _session_of(self, response: StoredResponse, tenant: str) -> str:
        if response.conversation is not None:
            await self.conversations.get(response.conversation, tenant)
            return response.conversation
        if response.previous_response_id is None:
            return response.session_id
        before = await self.settled(response.previous_response_id, tenant)
        if before.status not in ("completed", "incomplete"):
            raise InvalidRequest(f"previous_response_id: {before.id} is {before.status}, nothing goes on from it")
        return before.session_id

    async def _fork(self, response: StoredResponse, tenant: str) -> str:
        """A session that shares what the previous response's has; the turn cuts it where it differs."""
        assert response.previous_response_id is not None
        before = await self.get(response.previous_response_id, tenant)
        child = f"fork-{response.id}"
        with suppress(SessionExists, SessionNotFound):  # asked again; or gone, and the history is computed anew
            await self._gateway.control.fork(before.session_id, tenant, child, None)
        return child

    async def _prepare(self, response: StoredResponse, tenant: str, session: Session | None) -> tuple[int, array[int]]:
        """In the turn's slot: what is read here is as it will be when the turn begins."""
        if session is not None and response.previous_response_id and session.session_id != f"fork-{response.id}":
            head = await self._journal.get_object(tenant, f"head/{session.session_id}")
            if head != response.previous_response_id.encode():
                raise _MovedOn("the session has gone on")
        messages = await self.history(response, tenant)
        if response.instructions:
            messages = [{"role": "system", "content": [{"text": response.instructions}]}, *messages]
        text = self._gateway.codec.render_chat([message_of(item) for item in messages])
        return await prepare_text(self._gateway, text, special=False)(session)

    async def history(self, response: StoredResponse, tenant: str) -> list[dict[str, Any]]:
        """All items up to the response's own input. Raises ResponseNotFound if one before it was deleted."""
        if response.conversation is not None:
            items = await self.conversations.items(response.conversation, tenant)
            response.first_item = 1 + max((number for number, _ in items), default=-1)
            return [*(item for _, item in items), *response.input]
        links, at = [response.input], response.previous_response_id
        while at is not None:
            known = self._histories.get((tenant, at))
            if known is not None:
                links.append(known)
                break
            before = await self.get(at, tenant)
            links.append([*before.input, _output_item(before)])
            at = before.previous_response_id
        return [item for link in reversed(links) for item in link]

    # ---- its end ----------------------------------------------------------------------------------------

    async def _finishing(
        self, response: StoredResponse, tenant: str, chunks: AsyncIterator[TurnChunk]
    ) -> AsyncIterator[TurnChunk]:
        """Pass chunks on; the response is written before the last of them is shown."""
        try:
            async for chunk in chunks:
                response.output[chunk.index :] = chunk.tokens
                if chunk.finish_reason:
                    await self._end(response, tenant, chunk)
                yield chunk
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]

    async def _end(self, response: StoredResponse, tenant: str, last: TurnChunk) -> None:
        count, details = len(response.output), {"cached_tokens": last.cached_len}
        response.status = {"stop": "completed", "length": "incomplete"}.get(last.finish_reason, "cancelled")
        response.finish = last.finish_reason
        response.text = self._text(response, last)
        response.usage = {
            "input_tokens": last.prompt_len,
            "input_tokens_details": details,
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": last.prompt_len + count,
        }
        if not response.stored:
            return
        objects = {f"response/{response.id}": _dump(response)}
        if response.status != "cancelled":
            objects[f"head/{response.session_id}"] = response.id.encode()
            objects[f"ref/{response.session_id}/{response.id}"] = b""
            if response.conversation is not None:
                objects |= item_objects(
                    response.conversation, response.first_item, [*response.input, _output_item(response)]
                )
            self._remember(response, tenant)
        await self._journal.put_objects(tenant, objects)

    def _text(self, response: StoredResponse, last: TurnChunk) -> str:
        sampling = session_pb2.Sampling.FromString(response.sampling)
        output = self._gateway.codec.stream(sampling.stop)
        return output.push(response.output) + output.finish(last.matched if isinstance(last.matched, str) else None)

    def _remember(self, response: StoredResponse, tenant: str) -> None:
        """Its history with it, for the next: what comes before it need not be read again."""
        known, previous = self._histories, response.previous_response_id
        before = known.get((tenant, previous)) if previous is not None else []
        if response.conversation is None and before is not None:
            self._histories[tenant, response.id] = [*before, *response.input, _output_item(response)]
            if len(self._histories) > MAX_HISTORIES:
                self._histories.popitem(last=False)

    async def _fail(self, response: StoredResponse, tenant: str, error: HoldfastError, *, told: bool = True) -> None:
        """It stays, and says so; but not one of which nobody was ``told``: its client got the error in its place."""
        response.status, response.error = "failed", {"code": error.code, "message": error.message}
        if response.saved and told:
            await self._save_if_possible(response, tenant)
        elif response.saved:
            with suppress(HoldfastError):
                await self._journal.delete_objects(tenant, [f"response/{response.id}"])

    async def _cancelled(self, response: StoredResponse, tenant: str) -> None:
        """Its client left, and its turn was rolled back."""
        if response.saved and not response.ended:
            response.status = "cancelled"
            await self._save_if_possible(response, tenant)

    async def _save_if_possible(self, response: StoredResponse, tenant: str) -> None:
        with suppress(HoldfastError):  # else who asks finds no turn, and settles it
            await self._save(response, tenant)

    async def _save(self, response: StoredResponse, tenant: str) -> None:
        response.saved = True
        await self._journal.put_objects(tenant, {f"response/{response.id}": _dump(response)})

    # ---- to find one ------------------------------------------------------------------------------------

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """As it was written last. Raises ResponseNotFound."""
        found = await self._journal.get_object(tenant, f"response/{response_id}")
        if found is None:
            raise ResponseNotFound(f"response {response_id} does not exist")
        return StoredResponse.model_validate_json(found)

    async def settled(self, response_id: str, tenant: str) -> StoredResponse:
        """As ``get``; one whose router is gone is gone on with first, here."""
        response = await self.get(response_id, tenant)
        if response.ended:
            return response
        run = self._runs.get(response_id) or self._in_background(response, tenant, resumed=True)
        with suppress(HoldfastError, StopAsyncIteration):  # a living router runs it, or it has ended meanwhile
            await anext(run.follow())
        return await self.get(response_id, tenant)

    async def follow(self, response_id: str, tenant: str, start: int) -> AsyncIterator[TurnChunk]:
        """Its output from token ``start`` on, whoever runs it: this router, another, a dead one, nobody."""
        while True:
            response = await self.get(response_id, tenant)
            if response.ended:
                yield self._ended(response, start)
                return
            run = self._runs.get(response_id) or self._in_background(response, tenant, resumed=True)
            try:
                async for chunk in self._shown_from(response, run.follow(), start):
                    yield chunk
                return
            except (SessionBusy, TurnNotFound, SessionNotFound):
                await asyncio.sleep(FOLLOW_POLL_S)  # until it begins, ends, or its router does

    async def _shown_from(
        self, response: StoredResponse, chunks: AsyncIterator[TurnChunk], start: int
    ) -> AsyncIterator[TurnChunk]:
        output = self._gateway.codec.stream(session_pb2.Sampling.FromString(response.sampling).stop)
        async for chunk in chunks:
            seen = max(0, min(len(chunk.tokens), start - chunk.index))
            output.push(chunk.tokens[:seen])
            text, matched = output.push(chunk.tokens[seen:]), chunk.matched
            if chunk.finish_reason:
                text += output.finish(matched if isinstance(matched, str) else None)
            if seen < len(chunk.tokens) or chunk.finish_reason:
                yield replace(chunk, index=chunk.index + seen, tokens=chunk.tokens[seen:], text=text)

    async def _resume(self, response: StoredResponse, tenant: str) -> AsyncIterator[TurnChunk]:
        """Take the turn of a response from a router that is gone."""
        try:
            chunks = self._gateway.resume(response.session_id, tenant, response.id, 0)
            async for chunk in self._finishing(response, tenant, chunks):
                yield chunk
        except (TurnNotFound, SessionNotFound) as error:
            # Not begun yet, or never any more.
            if time.time() - response.created_at > self._gateway.config.token_timeout_s:
                await self._fail(response, tenant, error)
            raise

    def _ended(self, response: StoredResponse, start: int) -> TurnChunk:
        output = self._gateway.codec.stream()
        output.push(response.output[:start])
        shown = output.text
        usage = response.usage or {}
        return TurnChunk(
            prompt_len=usage.get("input_tokens", 0),
            cached_len=usage.get("input_tokens_details", {}).get("cached_tokens", 0),
            index=min(start, len(response.output)),
            tokens=response.output[start:],
            text=response.text[len(shown) :],
            finish_reason=response.finish or "abort",
        )

    # ---- to end one -------------------------------------------------------------------------------------

    async def cancel(self, response_id: str, tenant: str) -> StoredResponse:
        """End a background response, whichever router runs it. One that has ended stays as it is.

        Raises DeadlineExceeded if it goes on.
        """
        response = await self.settled(response_id, tenant)
        if not response.background:
            raise InvalidRequest(f"response {response_id} does not run in the background; close its stream")
        deadline = time.monotonic() + self._gateway.config.control_timeout_s
        if not response.ended:
            await self._journal.put_objects(tenant, {f"cancel/{response_id}": b""})
        while not response.ended:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"response {response_id} still runs")
            await asyncio.sleep(FOLLOW_POLL_S)
            response = await self.settled(response_id, tenant)
        await self._journal.delete_objects(tenant, [f"cancel/{response_id}"])
        return response

    async def _watch_cancel(self, response_id: str, tenant: str) -> None:
        while await self._journal.get_object(tenant, f"cancel/{response_id}") is None:
            await asyncio.sleep(CANCEL_POLL_S)
        self._gateway.abort(response_id)

    async def delete(self, response_id: str, tenant: str) -> None:
        """Forget a response; with the last one of a session, the session. Raises ResponseNotFound."""
        response = await self.get(response_id, tenant)
        if not response.ended and response.background:
            await self.cancel(response_id, tenant)
        keys = [f"response/{response_id}", f"ref/{response.session_id}/{response_id}"]
        await self._journal.delete_objects(tenant, keys)
        self._histories.pop((tenant, response_id), None)
        if response.conversation is None and not await self._journal.list_objects(
            tenant, f"ref/{response.session_id}/"
        ):
            await release_session(self._gateway, response.session_id, tenant)


def message_of(item: dict[str, Any]) -> dict[str, str]:
    """An item as the chat template takes it."""
    return {"role": item["role"], "content": "".join(part["text"] for part in item["content"])}


def _output_item(response: StoredResponse) -> dict[str, Any]:
    return {
        "id": response.message_id,
        "type": "message",
        "role": "assistant",
        "status": "completed" if response.status == "completed" else "incomplete",
        "content": [{"type": "output_text", "text": response.text, "annotations": []}],
    }


def output_items(response: StoredResponse) -> list[dict[str, Any]]:
    """What a response that has ended says."""
    return [_output_item(response)] if response.status in ("completed", "incomplete") else []


def _dump(response: StoredResponse) -> bytes:
    return response.model_dump_json().encode()
