"""SGLang's and vLLM's endpoints beside generation: what is served, tokenizing, and a health check that generates."""

from __future__ import annotations

from array import array
from importlib import metadata
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from holdfast.errors import InvalidRequest
from holdfast.v1 import session_pb2
from router.core import RouterCore
from router.faces.fields import TokenId
from router.faces.http import Tenant, collect, until_disconnect
from router.faces.messages import template_messages
from router.faces.tools import ToolFields
from router.turns.sessions import Session
from router.turns.turn import TurnRequest

MAX_TEXTS = 1024


class TokenizeBody(ToolFields):
    """A prompt or several, or, as vLLM has it, a chat."""

    prompt: str | Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Default: before a prompt, and not before a chat, whose template has them."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    tokens: list[TokenId] | Annotated[list[list[TokenId]], Field(max_length=MAX_TEXTS)]
    skip_special_tokens: bool = True


def info_routes(core: RouterCore) -> APIRouter:
    """The endpoints over a router."""
    routes, version = APIRouter(), metadata.version("holdfast")

    @routes.get("/get_model_info")
    @routes.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return {
            "model_path": str(core.config.model),
            "tokenizer_path": str(core.config.model),
            "is_generation": True,
            "served_model_name": core.config.served_model_name,
            "max_context_length": core.fleet.context_len,
        }

    @routes.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        """SGLang's figures of load, one entry a worker, as of its last beat."""
        return {
            "loads": [
                {
                    "dp_rank": i,
                    "worker_id": link.name,
                    "num_running_reqs": link.stats.running,
                    "num_waiting_reqs": link.stats.waiting,
                    "num_sessions": link.stats.sessions,
                    "pages_by_group": {
                        group.group: {"total": group.total, "free": group.free, "cached": group.cached}
                        for group in link.stats.groups
                    },
                }
                for i, link in enumerate(core.fleet.alive())
            ]
        }

    @routes.get("/get_server_info")
    @routes.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {
            "model_path": str(core.config.model),
            "served_model_name": core.config.served_model_name,
            "context_length": core.fleet.context_len,
            "max_total_num_tokens": core.fleet.num_kv_tokens,
            "page_size": core.fleet.page_size,
            "version": version,
            "status": "ready" if core.fleet.alive() else "no worker",
            "workers": [link.name for link in core.fleet.alive()],
            "max_live_turns": core.config.max_live_turns,
        }

    @routes.get("/version")
    async def versions() -> dict[str, str]:
        return {"version": version}

    @routes.get("/load")
    async def load() -> dict[str, int]:
        """vLLM's figure of load: the turns that run or wait on this router."""
        return {"server_load": core.live.num_turns}

    @routes.get("/health_generate")
    async def health_generate(http: Request) -> Response:
        """A worker generates one token; an error's status otherwise."""

        async def prepare(session: Session | None) -> tuple[int, array[int]]:
            return 0, array("i", [core.codec.bos_id or 0])

        request = TurnRequest(tenant="", prepare=prepare, sampling=session_pb2.Sampling(max_tokens=1))
        result = await until_disconnect(http, collect(core.gateway.run(request)))
        return result if isinstance(result, Response) else Response(status_code=200)

    @routes.post("/tokenize")
    @routes.post("/v1/tokenize")
    async def tokenize(tenant: Tenant, body: TokenizeBody) -> dict[str, Any]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("set exactly one of prompt and messages", "prompt")
        if body.messages is not None:
            use = body.tool_use()
            texts = [
                await core.inputs.render_chat(
                    template_messages(body.messages, core.codec.chat_template),
                    use.templates,
                    body.template_variables(),
                    continues=body.continue_final_message,
                    answers=body.add_generation_prompt,
                )
            ]
        else:
            texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
        special = body.add_special_tokens if body.add_special_tokens is not None else body.messages is None
        tokens = [(await core.inputs.encode(text, special=special)).tolist() for text in texts]
        fields: dict[str, list[Any]] = {"tokens": tokens, "count": [len(part) for part in tokens]}
        if body.return_token_strs:
            fields["token_strs"] = [[core.codec.decode([token]) for token in part] for part in tokens]
        one = {name: each[0] for name, each in fields.items()} if not isinstance(body.prompt, list) else fields
        return one | {"max_model_len": core.fleet.context_len}

    @routes.post("/detokenize")
    @routes.post("/v1/detokenize")
    async def detokenize(tenant: Tenant, body: DetokenizeBody) -> dict[str, Any]:
        def text_of(tokens: Any) -> str:
            if any(token >= core.codec.vocab_size for token in tokens):
                raise InvalidRequest(f"tokens: each must be from 0 to {core.codec.vocab_size - 1}", "tokens")
            return core.codec.decode(tokens, special=not body.skip_special_tokens)

        several = bool(body.tokens) and isinstance(body.tokens[0], list)
        text = [text_of(part) for part in body.tokens] if several else text_of(body.tokens)
        return {"text": text, "prompt": text}  # SGLang's name and vLLM's

    return routes
