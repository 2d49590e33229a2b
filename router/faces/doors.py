"""Who may come in: before anything of a request's body is read."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.errors import Forbidden, HoldfastError
from router.access.audit_log import AuditLog
from router.access.keys import Identity, Keyring
from router.access.rules import HTTP_RULES, OPERATOR, USER, admit
from router.faces.anthropic.answer import anthropic_error
from router.faces.http import IDENTITY, INNER_TENANT, error_response
from router.faces.request_trace import RequestTrace
from router.tracing import Tracing

_PATTERNS = [(compile_path(path)[0], rule) for path, rule in HTTP_RULES.items() if "{" in path]


class Doors:
    """ASGI middleware: a request to an endpoint that needs a role must come with a key that has it.

    What operators do is in the audit log, and what others tried.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, audit_log: AuditLog, tracing: Tracing | None) -> None:
        self._app, self._keyring, self._audit_log, self._tracing = app, keyring, audit_log, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            rule = rule_of(scope["path"])
            try:
                identity = self._identify(scope, rule)
            except HoldfastError as error:
                self._note(scope, rule, None, error.code)
                await error_in_format(scope["path"], error)(scope, receive, send)
                return
            if rule is not None:
                scope = {**scope, IDENTITY: identity}
                self._note(scope, rule, identity, "admitted")
            if rule == USER and self._tracing is not None:
                trace = RequestTrace(self._tracing, scope)
                try:
                    await self._app(scope, receive, trace.sending(send))
                finally:
                    trace.end()
                return
        await self._app(scope, receive, send)

    def _identify(self, scope: Scope, rule: str | None) -> Identity | None:
        inner = scope.get(INNER_TENANT)
        if inner is not None:
            return Identity(str(inner), frozenset((USER,)))
        if rule is None:
            return None  # there is no such endpoint
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        # As OpenAI's clients send it, or as Anthropic's do.
        return admit(self._keyring, headers.get(b"authorization") or headers.get(b"x-api-key"), rule)

    def _note(self, scope: Scope, rule: str | None, identity: Identity | None, outcome: str) -> None:
        if rule == OPERATOR:
            self._audit_log.write(
                f"{scope['method']} {scope['path']}",
                query=scope["query_string"].decode("latin-1"),
                key_id=identity.key_id if identity is not None else None,
                tenant=identity.tenant if identity is not None else None,
                client=scope["client"][0] if scope.get("client") else None,
                outcome=outcome,
            )


def rule_of(path: str) -> str | None:
    """The role that a path needs; None: there is no such endpoint."""
    known = HTTP_RULES.get(path)
    if known is not None:
        return known
    return next((rule for pattern, rule in _PATTERNS if pattern.match(path)), None)


async def refuse_unlisted(request: Request) -> None:
    """An endpoint without a rule is nobody's. Raises Forbidden."""
    if IDENTITY not in request.scope:
        raise Forbidden(f"{request.url.path}: nobody may call this")


def error_in_format(path: str, error: HoldfastError) -> Response:
    """An error, as clients of that endpoint expect it."""
    return anthropic_error(error) if path.startswith("/v1/messages") else error_response(error)
