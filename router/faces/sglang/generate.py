"""SGLang's native HTTP API, so that its clients can switch to Holdfast unchanged.

SGLang has two kinds of sessions. On a streaming session (``open_session`` with ``streaming``) a turn
appends to the session; what SGLang refuses there is refused here in the same way, and does not change
the session. On the others a request continues any earlier request: see ``sglang.sessions``.
"""

from __future__ import annotations

import asyncio
import uuid
from array import array
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from holdfast.errors import InvalidRequest, PromptTooLong, SessionBusy, SessionExists, SessionNotFound
from holdfast.tokens import out_of_vocabulary
from router.access.rules import OPERATOR
from router.core import RouterCore
from router.faces.http import Caller, Tenant, collect, event_stream, first_chunk, until_disconnect
from router.faces.several import collect_all, first_of, side_by_side
from router.faces.sglang.answers import Answer, answer_events, batch_events
from router.faces.sglang.bodies import (
    AbortBody,
    BatchBody,
    CloseSessionBody,
    GenerateBody,
    OpenSessionBody,
    PauseBody,
)
from router.faces.sglang.sessions import BranchingSessions, SessionParams
from router.turns.sessions import Session
from router.turns.turn import TurnRequest


def sglang_routes(core: RouterCore) -> APIRouter:
    """The endpoints over a router."""
    routes = APIRouter()
    trees = BranchingSessions(core)

    @routes.get("/open_session")
    @routes.post("/open_session")
    async def open_session(tenant: Tenant, body: OpenSessionBody) -> Any:
        session_id = body.session_id or uuid.uuid4().hex
        if body.session_id:
            with suppress(SessionNotFound):
                await core.control.load(session_id, tenant)
                raise SessionExists(f"session {session_id} is open already; close it, or use another id")
        if not body.streaming:
            await trees.open(session_id, tenant)
            return session_id
        return (await core.control.open_session(session_id, tenant)).shown_id

    @routes.get("/close_session")
    @routes.post("/close_session")
    async def close_session(tenant: Tenant, body: CloseSessionBody) -> Response:
        if await trees.has(body.session_id, tenant):
            await trees.close(body.session_id, tenant)
        else:
            await core.control.release(body.session_id, tenant)
        return Response(status_code=200)

    @routes.post("/generate")
    @routes.put("/generate")
    async def generate(http: Request, tenant: Tenant, batch: BatchBody) -> Any:
        parts = batch.parts()
        if batch.is_batch:
            return await _generate_batch(core, http, tenant, batch, parts)
        (body,) = parts
        request = _turn_request(core, body, tenant)
        answer = Answer(body, request, core.codec)
        params = body.session_params
        if params is not None and params.id and await trees.has(params.id, request.tenant):
            request.create_session = True
            stream = trees.run(request, params, partial(_input_ids, core, body))
        else:
            _check_streaming(params)
            stream = core.gateway.run(request)
        try:
            if body.stream:
                first = await until_disconnect(http, first_chunk(stream))
                if isinstance(first, Response):
                    return first
                return event_stream(answer_events(answer, first, stream))
            result = await until_disconnect(http, collect(stream))
        except (PromptTooLong, SessionBusy, SessionNotFound, InvalidRequest) as error:
            return JSONResponse({"error": {"message": error.message, "code": error.code}}, 400)
        if isinstance(result, Response):
            return result
        total, text = result
        answer.add(total, text)
        return answer.body()

    @routes.post("/abort_request")
    async def abort_request(caller: Caller, body: AbortBody) -> Response:
        """The tenant's turns. An operator's ``abort_all`` is of all tenants' turns."""
        everything = body.abort_all and OPERATOR in caller.roles
        for tenant, turn_id in core.live.ids(None if everything else caller.tenant):
            # SGLang matches by prefix, which aborts all parts of a batch.
            if body.abort_all or (body.rid and turn_id.startswith(body.rid)):
                core.live.abort(tenant, turn_id)
        return Response(status_code=200)

    @routes.post("/pause_generation")
    async def pause_generation(body: PauseBody | None = None) -> dict[str, str]:
        """Pause every worker. What is submitted meanwhile waits."""
        mode = (body or PauseBody()).value()
        await asyncio.gather(*(link.pause(mode, core.config.control_timeout_s) for link in core.fleet.alive()))
        return {"status": "ok", "message": "Generation paused successfully."}

    @routes.post("/continue_generation")
    async def continue_generation() -> dict[str, str]:
        await asyncio.gather(*(link.go_on(core.config.control_timeout_s) for link in core.fleet.alive()))
        return {"status": "ok", "message": "Generation continued successfully."}

    @routes.get("/flush_cache")
    @routes.post("/flush_cache")
    async def flush_cache(caller: Caller) -> Response:
        """Drop the tenant's cached KV; an operator's call drops all tenants'."""
        tenant = None if OPERATOR in caller.roles else caller.tenant
        for link in core.fleet.alive():
            await link.flush(tenant, core.config.control_timeout_s)
        return Response("Cache flushed.\n")

    return routes


async def _generate_batch(
    core: RouterCore, http: Request, tenant: str, batch: BatchBody, parts: list[GenerateBody]
) -> Any:
    """Each prompt's answer, in order; in a stream, each event with its prompt's ``index``."""
    if batch.session_params is not None and batch.session_params.id:
        raise InvalidRequest("session_params: a session has one turn at a time; send one prompt", "session_params")
    requests = [_turn_request(core, part, tenant) for part in parts]
    answers = [Answer(part, request, core.codec) for part, request in zip(parts, requests, strict=True)]
    twice = [turn_id for turn_id, count in Counter(request.turn_id for request in requests).items() if count > 1]
    if twice:
        raise InvalidRequest(f"rid: Duplicate request ID {twice[0]}", "rid")
    try:
        if batch.stream:
            chunks = side_by_side(core, requests)
            first = await until_disconnect(http, first_of(chunks))
            return first if isinstance(first, Response) else event_stream(batch_events(answers, first, chunks))
        results = await until_disconnect(http, collect_all(core, requests))
    except (PromptTooLong, InvalidRequest) as error:
        return JSONResponse({"error": {"message": error.message, "code": error.code}}, 400)
    if isinstance(results, Response):
        return results
    for answer, (total, text) in zip(answers, results, strict=True):
        answer.add(total, text)
    return [answer.body() for answer in answers]


def _check_streaming(params: SessionParams | None) -> None:
    for name in ("offset", "replace", "drop_previous_output"):
        if params is not None and params.id and getattr(params, name):
            raise InvalidRequest(f"session_params.{name} is not supported on a streaming session, which appends")


async def _input_ids(core: RouterCore, body: GenerateBody, num_before: int) -> array[int]:
    if body.input_ids is None:
        ids = await core.inputs.encode(body.text or "", special=num_before == 0)
    else:
        ids = array("i", body.input_ids)
        # Clients tokenize each input on its own: drop a BOS that does not start the sequence.
        ids = ids[1:] if num_before and ids and ids[0] == core.codec.bos_id else ids
    if body.return_logprob and body.logprob_start_len > num_before + len(ids):
        raise InvalidRequest(
            f"logprob_start_len: is {body.logprob_start_len}, and there are {num_before + len(ids)} tokens",
            "logprob_start_len",
        )
    return ids


def _turn_request(core: RouterCore, body: GenerateBody, tenant: str) -> TurnRequest:
    params = body.session_params
    session_id = (params.id if params else None) or ""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("set exactly one of text and input_ids", "text")
    num_ids = core.fleet.vocab_size or 2**31  # while no worker is there to ask
    if out_of_vocabulary(array("i", body.token_ids_logprob or ()), num_ids) is not None:
        raise InvalidRequest(
            f"token_ids_logprob: has out-of-vocabulary ids; they are from 0 to {num_ids - 1}", "token_ids_logprob"
        )

    async def prepare(session: Session | None) -> tuple[int, array[int]]:
        keep_len = len(session.tokens) if session else 0
        if request.sampling.HasField("logprob_start"):
            # As SGLang: what the session has already is not computed again for its logprobs.
            request.sampling.logprob_start = max(keep_len, body.logprob_start_len)
        return keep_len, await _input_ids(core, body, keep_len)

    request = TurnRequest(
        tenant=tenant,
        prepare=prepare,
        sampling=body.sampling(),
        session_id=session_id,
        create_session=False,
        queue=False,
    )
    if body.rid:
        request.turn_id = body.rid
    return request
