"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from router.core import RouterCore
from router.faces.anthropic.answer import MessageAnswer
from router.faces.anthropic.bodies import CountBody, MessagesBody
from router.faces.constrain import constrain
from router.faces.fields import SessionHeader
from router.faces.http import Tenant, collect, event_stream, first_chunk, until_disconnect
from router.faces.messages import template_messages
from router.faces.openai.generation import check_model
from router.turns.turn import TurnRequest


def anthropic_routes(core: RouterCore) -> APIRouter:
    """The endpoints over a router. A session is named by ``X-Session-ID``; ``metadata.user_id`` steers placement."""
    routes = APIRouter()

    async def render(body: CountBody) -> str:
        check_model(core, body.model)
        return await core.inputs.render_chat(
            template_messages(body.conversation(), core.codec.chat_template),
            body.tool_use().templates,
            body.template_variables(),
            continues=body.continues,
        )

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(tenant: Tenant, body: CountBody) -> Any:
        return {"input_tokens": len(await core.inputs.encode(await render(body), special=False))}

    @routes.post("/v1/messages")
    async def messages(http: Request, tenant: Tenant, body: MessagesBody, x_session_id: SessionHeader = "") -> Any:
        text, sampling = await render(body), body.sampling()
        new_parser = constrain(core, body.tool_use(), text, sampling, reasoning=True)
        request = TurnRequest(
            tenant,
            core.inputs.of_text(text, special=False),
            sampling,
            session_id=x_session_id,
            cache_key=(body.metadata.user_id or "") if body.metadata is not None else "",
        )
        model = core.config.served_model_name
        answer = MessageAnswer(core.codec, new_parser, request.turn_id, model, thinks=body.thinks)
        stream = core.gateway.run(request)
        if body.stream:
            first = await until_disconnect(http, first_chunk(stream))
            return first if isinstance(first, Response) else event_stream(answer.events(first, stream))
        result = await until_disconnect(http, collect(stream))
        return result if isinstance(result, Response) else answer.whole(*result)

    return routes
