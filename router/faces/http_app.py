"""All HTTP APIs as one application."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from holdfast.errors import HoldfastError, InvalidRequest
from router.core import RouterCore
from router.faces.anthropic.messages import anthropic_routes
from router.faces.docs_page import docs_routes
from router.faces.doors import Doors, error_in_format, refuse_unlisted
from router.faces.fields import refuse_invalid_text
from router.faces.http import LimitedBody, RequestIds
from router.faces.openai.batches import batch_routes
from router.faces.openai.chat import chat_routes
from router.faces.openai.completions import completion_routes
from router.faces.openai.conversation_routes import conversation_routes
from router.faces.openai.conversations import Conversations
from router.faces.openai.files import MULTIPART_BYTES, file_routes
from router.faces.openai.response_turns import ResponseTurns
from router.faces.openai.responses import response_routes
from router.faces.operator import operator_routes
from router.faces.sglang.generate import sglang_routes
from router.faces.sglang.info import info_routes
from router.faces.sglang.parsing import parsing_routes
from router.faces.sglang.score import score_routes


def http_app(core: RouterCore, grpc_address: Callable[[], str]) -> FastAPI:
    """The application over a router. ``grpc_address``: of this router's gRPC server."""

    dependencies = [Depends(refuse_unlisted), Depends(refuse_invalid_text)]
    app = FastAPI(title="Holdfast", docs_url=None, redoc_url=None, dependencies=dependencies)
    limits = {"": core.config.max_message_bytes, "/v1/files": core.config.max_file_bytes + MULTIPART_BYTES}
    app.add_middleware(LimitedBody, limits=limits)
    app.add_middleware(Doors, keyring=core.keyring, audit_log=core.audit_log, tracing=core.tracing)
    app.add_middleware(RequestIds)
    conversations = Conversations(core)
    app.include_router(completion_routes(core))
    app.include_router(chat_routes(core))
    app.include_router(anthropic_routes(core))
    app.include_router(response_routes(core, ResponseTurns(core, conversations)))
    app.include_router(conversation_routes(conversations))
    app.include_router(file_routes(core))
    app.include_router(batch_routes(core))
    app.include_router(sglang_routes(core))
    app.include_router(info_routes(core))
    app.include_router(parsing_routes(core))
    app.include_router(score_routes(core))
    app.include_router(docs_routes())
    app.include_router(operator_routes(core, grpc_address))
    _answer_errors(app)
    return app


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(HoldfastError)
    async def holdfast_error(request: Request, error: HoldfastError) -> Response:
        return error_in_format(request.url.path, error)

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)  # of a part of a body, once it is taken apart
    async def validation_error(request: Request, error: RequestValidationError | ValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if part != "body")
        return await holdfast_error(request, InvalidRequest(f"{param or 'request'}: {first['msg']}", param or None))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 404:
            near = [path for path in app.openapi()["paths"] if path.startswith(request.url.path[:3])]
            error.detail = f"{request.method} {request.url.path} is not served here; there are {', '.join(near)}"
        body = {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": body}, error.status_code)
