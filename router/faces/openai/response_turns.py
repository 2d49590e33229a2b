"""Responses of OpenAI's API: each is one turn on a session, and is stored in the journal.

With ``previous_response_id`` a response continues the previous response's session if that was the
session's last turn, otherwise a fork of it: copy-on-write KV, nothing is computed again. A conversation
is one session, and a list of items that its responses add to.

While a response runs, its output is in the journal's turn. When it ends, the output is stored in the
response, so that any router can return it later.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.errors import (
    DeadlineExceeded,
    HoldfastError,
    InvalidRequest,
    PreviousResponseNotFound,
    ResponseNotFound,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    TurnNotFound,
)
from holdfast.v1 import session_pb2
from router.core import RouterCore
from router.faces.constrain import constrain
from router.faces.openai.conversations import Conversations, item_objects, release_session
from router.faces.openai.response_input import render_input
from router.faces.openai.response_output import ResponseOutput
from router.faces.openai.response_run import ResponseRun
from router.faces.openai.response_tools import tool_use_of
from router.faces.openai.stored_response import StoredResponse
from router.turns.sessions import Session
from router.turns.turn import TurnChunk, TurnRequest

CANCEL_POLL_S = 0.5
"""Interval at which a background response checks whether it was cancelled."""
FOLLOW_POLL_S = 0.1
"""Interval at which a response that another router runs is read."""
MAX_HISTORIES = 256
"""Cached histories of responses, so that a history is not read response by response."""


class _SessionChanged(InvalidRequest):
    """Another turn has followed the response that this one continues."""


class ResponseTurns:
    """Runs, stores and finds responses. One a router; the journal is shared."""

    def __init__(self, core: RouterCore, conversations: Conversations) -> None:
        self._core = core
        self._journal = core.journal
        self._conversations = conversations
        self._runs: dict[str, ResponseRun] = {}
        self._histories: OrderedDict[tuple[str, str], list[dict[str, Any]]] = OrderedDict()

    # ---- create -----------------------------------------------------------------------------------------

    async def create(self, response: StoredResponse, tenant: str) -> AsyncGenerator[TurnChunk, None]:
        """Begin a response and return its output. A background response runs whether it is read or not."""
        if response.background:
            await self._save(response, tenant)
            return self._in_background(response, tenant).follow()
        return self._run(response, tenant)

    def _in_background(self, response: StoredResponse, tenant: str, resumed: bool = False) -> ResponseRun:
        run = self._runs[response.id] = ResponseRun()

        async def work() -> None:
            watch = asyncio.create_task(self._watch_cancel(response.id, tenant))
            try:
                chunks = self._resume(response, tenant) if resumed else self._run(response, tenant)
                async for chunk in chunks:
                    run.chunks.append(chunk)
                    run.changed()
            except HoldfastError as error:
                run.error = error
            finally:
                watch.cancel()
                self._runs.pop(response.id, None)
                run.done = True
                run.changed()

        run.task = asyncio.create_task(work())
        return run

    async def _run(self, response: StoredResponse, tenant: str) -> AsyncGenerator[TurnChunk, None]:
        """Run the response's turn. Closing this early, as when the client disconnects, aborts it."""
        announced = response.background
        self._note_format(response)
        try:
            session_id = await self._session_of(response, tenant)
            while True:
                sampling = session_pb2.Sampling.FromString(response.sampling)
                request = TurnRequest(
                    tenant=tenant,
                    prepare=partial(self._prepare, response, tenant, sampling),
                    sampling=sampling,
                    session_id=session_id if response.stored else "",
                    queue=response.conversation is None,
                    turn_id=response.id,
                    rolled_back=partial(self._cancelled, response, tenant),
                )
                response.session_id = session_id
                if response.stored:
                    await self._save(response, tenant)
                try:
                    async for chunk in self._storing(response, tenant, self._core.gateway.run(request)):
                        announced = True
                        yield chunk
                    return
                except _SessionChanged:
                    session_id = await self._fork(response, tenant)
        except HoldfastError as error:
            if not response.output:  # otherwise its turn was left open, and is resumed at the next request for it
                await self._fail(response, tenant, error, announced=announced)
            raise

    def _note_format(self, response: StoredResponse) -> None:
        """Have every router read the output alike: with its special tokens, where these say what is what."""
        if self._core.style.reads(calls=bool(response.tools), reasoning=True):
            sampling = session_pb2.Sampling.FromString(response.sampling)
            sampling.show_special_tokens = True
            response.sampling = sampling.SerializeToString()

    async def _session_of(self, response: StoredResponse, tenant: str) -> str:
        if response.conversation is not None:
            await self._conversations.get(response.conversation, tenant)
            return response.conversation
        if response.previous_response_id is None:
            return response.session_id
        try:
            before = await self.settled(response.previous_response_id, tenant)
        except ResponseNotFound:
            message = f"Previous response with id '{response.previous_response_id}' not found."
            raise PreviousResponseNotFound(message, "previous_response_id") from None
        if before.status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"previous_response_id: {before.id} is {before.status} and cannot be continued", "previous_response_id"
            )
        return before.session_id

    async def _fork(self, response: StoredResponse, tenant: str) -> str:
        """Fork the previous response's session; the turn cuts the fork where its history differs."""
        assert response.previous_response_id is not None
        before = await self.get(response.previous_response_id, tenant)
        child = f"fork-{response.id}"
        with suppress(SessionExists, SessionNotFound):  # a retry; or released, and the history is computed again
            await self._core.control.fork(before.session_id, tenant, child, None)
        return child

    async def _prepare(
        self, response: StoredResponse, tenant: str, sampling: session_pb2.Sampling, session: Session | None
    ) -> tuple[int, array[int]]:
        """Called with the session locked: what is read here does not change before the turn begins."""
        if session is not None and response.previous_response_id and session.record.shown_id != f"fork-{response.id}":
            head = await self._journal.get_object(tenant, f"head/{session.record.shown_id}")
            if head != response.previous_response_id.encode():
                raise _SessionChanged("another turn followed on the session")
        use = tool_use_of(response)
        text = await render_input(self._core, response, await self.history(response, tenant), use, sampling)
        constrain(self._core, use, text, sampling, reasoning=True)
        return await self._core.inputs.of_text(text, special=False)(session)

    async def num_input_tokens(self, response: StoredResponse, tenant: str) -> int:
        """Of a response that is not created: its history's and its own. Raises as ``create``."""
        await self._session_of(response, tenant)
        items, sampling = await self.history(response, tenant), session_pb2.Sampling.FromString(response.sampling)
        text = await render_input(self._core, response, items, tool_use_of(response), sampling)
        return len(await self._core.inputs.encode(text, special=False))

    async def history(self, response: StoredResponse, tenant: str) -> list[dict[str, Any]]:
        """All items up to and including the response's input. Raises ResponseNotFound if an earlier one was deleted."""
        if response.conversation is not None:
            items = await self._conversations.items(response.conversation, tenant)
            response.first_item = 1 + max((number for number, _ in items), default=-1)
            return [*(item for _, item in items), *response.input]
        links, at = [response.input], response.previous_response_id
        while at is not None:
            known = self._histories.get((tenant, at))
            if known is not None:
                links.append(known)
                break
            before = await self.get(at, tenant)
            links.append([*before.input, *before.items])
            at = before.previous_response_id
        return [item for link in reversed(links) for item in link]

    # ---- end --------------------------------------------------------------------------------------------

    async def _storing(
        self, response: StoredResponse, tenant: str, chunks: AsyncGenerator[TurnChunk, None]
    ) -> AsyncGenerator[TurnChunk, None]:
        """Pass on chunks, and store the response before its last chunk."""
        try:
            async for chunk in chunks:
                response.output[chunk.index :] = chunk.tokens
                response.logprobs += [item.SerializeToString() for item in chunk.logprobs]
                if chunk.finish_reason:
                    await self._end(response, tenant, chunk)
                yield chunk
        finally:
            await chunks.aclose()

    async def _end(self, response: StoredResponse, tenant: str, last: TurnChunk) -> None:
        count, details = len(response.output), {"cached_tokens": last.cached_len}
        response.status = {"stop": "completed", "length": "incomplete"}.get(last.finish_reason, "cancelled")
        response.finish, response.matched = last.finish_reason, last.matched
        output = ResponseOutput(self._core, response)
        output.read_all(response)
        response.items = output.items
        response.usage = {
            "input_tokens": last.prompt_len,
            "input_tokens_details": details,
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
            "total_tokens": last.prompt_len + count,
        }
        if not response.stored:
            return
        objects = {f"response/{response.id}": response.model_dump_json().encode()}
        if response.status != "cancelled":
            objects[f"head/{response.session_id}"] = response.id.encode()
            objects[f"ref/{response.session_id}/{response.id}"] = b""
            if response.conversation is not None:
                objects |= item_objects(response.conversation, response.first_item, [*response.input, *response.items])
            self._remember(response, tenant)
        await self._journal.put_objects(tenant, objects)

    def _remember(self, response: StoredResponse, tenant: str) -> None:
        """Cache the history up to the response, so that the next one need not read it."""
        known, previous = self._histories, response.previous_response_id
        before = known.get((tenant, previous)) if previous is not None else []
        if response.conversation is None and before is not None:
            self._histories[tenant, response.id] = [*before, *response.input, *response.items]
            if len(self._histories) > MAX_HISTORIES:
                self._histories.popitem(last=False)

    async def _fail(
        self, response: StoredResponse, tenant: str, error: HoldfastError, *, announced: bool = True
    ) -> None:
        """Store the failure, unless the client never got the response's id: it got the error instead."""
        response.status, response.error = "failed", {"code": error.code, "message": error.message}
        if response.saved and announced:
            await self._save_if_possible(response, tenant)
        elif response.saved:
            with suppress(HoldfastError):
                await self._journal.delete_objects(tenant, [f"response/{response.id}"])

    async def _cancelled(self, response: StoredResponse, tenant: str) -> None:
        """The client disconnected, and the turn was rolled back."""
        if response.saved and not response.ended:
            response.status = "cancelled"
            await self._save_if_possible(response, tenant)

    async def _save_if_possible(self, response: StoredResponse, tenant: str) -> None:
        with suppress(HoldfastError):  # otherwise the next request for it finds no turn, and settles it
            await self._save(response, tenant)

    async def _save(self, response: StoredResponse, tenant: str) -> None:
        response.saved = True
        await self._journal.put_objects(tenant, {f"response/{response.id}": response.model_dump_json().encode()})

    # ---- find -------------------------------------------------------------------------------------------

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """The response as it was stored last. Raises ResponseNotFound."""
        found = await self._journal.get_object(tenant, f"response/{response_id}")
        if found is None:
            raise ResponseNotFound(f"Response with id '{response_id}' not found.")
        return StoredResponse.model_validate_json(found)

    async def settled(self, response_id: str, tenant: str) -> StoredResponse:
        """As ``get``, but resumes a response whose router was lost."""
        response = await self.get(response_id, tenant)
        if response.ended:
            return response
        run = self._runs.get(response_id) or self._in_background(response, tenant, resumed=True)
        with suppress(HoldfastError, StopAsyncIteration):  # another router runs it, or it ended meanwhile
            await anext(run.follow())
        return await self.get(response_id, tenant)

    async def follow(self, response_id: str, tenant: str) -> AsyncGenerator[TurnChunk, None]:
        """The output from its start on, whether this router runs it, another, or a lost one did."""
        while True:
            response = await self.get(response_id, tenant)
            if response.ended:
                yield _ended(response)
                return
            run = self._runs.get(response_id) or self._in_background(response, tenant, resumed=True)
            try:
                async for chunk in run.follow():
                    yield chunk
                return
            except (SessionBusy, TurnNotFound, SessionNotFound):
                await asyncio.sleep(FOLLOW_POLL_S)  # until it begins, ends, or its router does

    async def _resume(self, response: StoredResponse, tenant: str) -> AsyncGenerator[TurnChunk, None]:
        """Resume a response's turn from a lost router."""
        try:
            chunks = self._core.gateway.resume(response.session_id, tenant, response.id, 0)
            async for chunk in self._storing(response, tenant, chunks):
                yield chunk
        except (TurnNotFound, SessionNotFound) as error:
            # The turn has not begun yet, or never will.
            if time.time() - response.created_at > self._core.config.token_timeout_s:
                await self._fail(response, tenant, error)
            raise

    # ---- cancel, delete ---------------------------------------------------------------------------------

    async def cancel(self, response_id: str, tenant: str) -> StoredResponse:
        """Cancel a background response, whichever router runs it. Idempotent; an ended one is not changed.

        Raises DeadlineExceeded if it still runs after ``control_timeout_s``.
        """
        response = await self.settled(response_id, tenant)
        if not response.background:
            raise InvalidRequest("Cannot cancel a synchronous response. Close its stream instead.")
        deadline = time.monotonic() + self._core.config.control_timeout_s
        if not response.ended:
            await self._journal.put_objects(tenant, {f"cancel/{response_id}": b""})
        while not response.ended:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"response {response_id} is still running")
            await asyncio.sleep(FOLLOW_POLL_S)
            response = await self.settled(response_id, tenant)
        await self._journal.delete_objects(tenant, [f"cancel/{response_id}"])
        return response

    async def _watch_cancel(self, response_id: str, tenant: str) -> None:
        while await self._journal.get_object(tenant, f"cancel/{response_id}") is None:
            await asyncio.sleep(CANCEL_POLL_S)
        while True:  # until the run ends: its turn may not be live yet
            self._core.live.abort(tenant, response_id)
            await asyncio.sleep(CANCEL_POLL_S)

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a response, and with the last response of a session the session. Raises ResponseNotFound."""
        response = await self.get(response_id, tenant)
        if not response.ended and response.background:
            await self.cancel(response_id, tenant)
        keys = [f"response/{response_id}", f"ref/{response.session_id}/{response_id}"]
        await self._journal.delete_objects(tenant, keys)
        self._histories.pop((tenant, response_id), None)
        if response.conversation is None and not await self._journal.list_objects(
            tenant, f"ref/{response.session_id}/"
        ):
            await release_session(self._core, response.session_id, tenant)


def _ended(response: StoredResponse) -> TurnChunk:
    usage = response.usage or {}
    return TurnChunk(
        prompt_len=usage.get("input_tokens", 0),
        cached_len=usage.get("input_tokens_details", {}).get("cached_tokens", 0),
        tokens=response.output,
        finish_reason=response.finish or "abort",
        matched=response.matched,
        logprobs=response.token_logprobs,
    )
