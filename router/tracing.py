"""Traces of turns, for OpenTelemetry: a span for each request and each turn, with its steps as children.

Callers' traces go on here (W3C Trace Context, ``traceparent``), and answers say which trace they belong to. Spans
have lengths, names and ids, and never text. Without an exporter nothing is made, and OpenTelemetry is not needed.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from holdfast.errors import ConfigError

CARRIED = ("traceparent", "tracestate")
CLOSE_S = 5.0
"""What is not sent by then is lost."""
CALLER: ContextVar[Any] = ContextVar("holdfast.trace", default=None)
"""The span that the present request's turns belong to, as an OpenTelemetry context."""


class TurnTrace:
    """One turn's spans. Without ``tracing`` it does nothing."""

    __slots__ = ("_context", "_span", "_stage", "_tracing")

    def __init__(self, tracing: Tracing | None = None, turn_id: str = "", session_id: str = "") -> None:
        self._tracing, self._span, self._context, self._stage = tracing, None, None, None
        if tracing is not None:
            names = {"holdfast.turn_id": turn_id, "holdfast.session_id": session_id}
            self._span, self._context = tracing.start("turn", CALLER.get(), names)

    @property
    def trace_id(self) -> str:
        """Empty without a trace."""
        return f"{self._span.get_span_context().trace_id:032x}" if self._span is not None else ""

    @contextmanager
    def step(self, name: str, **attributes: str) -> Iterator[None]:
        """A span around some work of the turn."""
        if self._tracing is None:
            yield
            return
        span, _ = self._tracing.start(name, self._context, attributes)
        try:
            yield
        except BaseException as error:
            _failed(span, error)
            raise
        finally:
            span.end()

    def enter(self, stage: str) -> None:
        """What the turn's worker does for it from now on, until it is said otherwise."""
        self.leave()
        if self._tracing is not None:
            self._stage, _ = self._tracing.start(stage, self._context, {})

    def leave(self) -> None:
        """The worker does nothing for it now."""
        if self._stage is not None:
            self._stage.end()
            self._stage = None

    def note(self, **attributes: Any) -> None:
        if self._span is not None:
            self._span.set_attributes({f"holdfast.{name}": value for name, value in attributes.items()})

    def end(self, error: BaseException | None = None) -> None:
        """The turn is over. Idempotent."""
        self.leave()
        if self._span is not None:
            if error is not None:
                _failed(self._span, error)
            self._span.end()
            self._tracing = self._span = None


class Tracing:
    """Where one router's spans go. ``endpoint``: an OTLP receiver's URL for traces, over HTTP."""

    def __init__(self, endpoint: str, service_name: str) -> None:
        # Imported here: it is an extra, and takes time to import.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("holdfast")
        self._propagator = TraceContextTextMapPropagator()

    def start(self, name: str, context: Any, attributes: dict[str, Any]) -> tuple[Any, Any]:
        """A span under ``context``'s, and the context for spans under it."""
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(name, context, attributes=attributes)
        return span, set_span_in_context(span, context)

    def context_of(self, carrier: dict[str, str]) -> Any:
        """Of a caller's headers; without a trace there, of none."""
        return self._propagator.extract({name: carrier[name] for name in CARRIED if name in carrier})

    def header_of(self, context: Any) -> bytes:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context)
        return carrier["traceparent"].encode()

    def called(self, metadata: Iterable[tuple[str, Any]]) -> None:
        """The present task serves a gRPC call with this metadata."""
        CALLER.set(self.context_of({name: value for name, value in metadata if isinstance(value, str)}))

    async def close(self) -> None:
        """Send what there is."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        deadline = time.monotonic() + CLOSE_S
        while thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


def start_tracing(endpoint: str | None, service_name: str) -> Tracing | None:
    """None without an endpoint. Raises ConfigError as ``check_tracing`` does."""
    if endpoint is None:
        return None
    check_tracing()
    return Tracing(endpoint, service_name)


def check_tracing() -> None:
    """Raises ConfigError if OpenTelemetry is not installed."""
    try:
        for name in ("opentelemetry.sdk.resources", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
            importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint: needs OpenTelemetry's exporter, pip install 'holdfast[tracing]' ({error})"
        ) from None


def _failed(span: Any, error: BaseException) -> None:
    from opentelemetry.trace import Status, StatusCode

    # The class alone: a message may have what a client wrote.
    span.set_status(Status(StatusCode.ERROR, type(error).__name__))
