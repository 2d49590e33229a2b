"""An HTTP request's span, in its caller's trace."""

from __future__ import annotations

from starlette.types import Message, Scope, Send

from router.tracing import CALLER, Tracing


class RequestTrace:
    """An HTTP request's span: turns that begin meanwhile belong to it."""

    def __init__(self, tracing: Tracing, scope: Scope) -> None:
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        method, path = scope["method"], scope["path"]
        wanted = {"http.request.method": method, "url.path": path}
        self._span, context = tracing.start(f"{method} {path}", tracing.context_of(carrier), wanted)
        self._header = (b"traceparent", tracing.header_of(context))
        self._token = CALLER.set(context)

    def sending(self, send: Send) -> Send:
        """``send``, with the trace's id among the answer's headers."""

        async def traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._span.set_attribute("http.response.status_code", message["status"])
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        return traced

    def end(self) -> None:
        CALLER.reset(self._token)
        self._span.end()
