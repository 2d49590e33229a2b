"""Traces as an OTLP receiver gets them, over HTTP."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cluster.config import Config
from holdfast.errors import ConfigError
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router import tracing
from tests.harness import HOST, running
from tests.ports import free_port
from tests.waiting import until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
SECRET = "a word that nobody else says"
BODY = {"model": "holdfast-tiny", "prompt": SECRET, "max_tokens": 40, "ignore_eos": True, "stream": True}


class Receiver:
    """Spans, as they were sent."""

    def __init__(self) -> None:
        self.raw = b""
        self.spans: list[Any] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                receiver.raw += data
                for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                    receiver.spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer((HOST, 0), Handler)
        self.url = f"http://{HOST}:{self.server.server_port}/v1/traces"

    def named(self, name: str, trace: str = TRACE) -> list[Any]:
        return [span for span in self.spans if span.name == name and span.trace_id.hex() == trace]

    def one(self, name: str, trace: str = TRACE) -> Any:
        (span,) = self.named(name, trace)
        return span


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever)
    thread.start()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()
    thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def test_a_turns_steps_are_in_its_callers_trace_through_a_failover(tmp_path: Path, receiver: Receiver) -> None:
    async with (
        running(tmp_path, otlp_traces_endpoint=receiver.url) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=60, headers={"X-Session-ID": "s"}) as http,
    ):
        lost, text = False, ""
        async with http.stream("POST", "/v1/completions", json=BODY, headers=PARENT) as answer:
            assert answer.headers["traceparent"].split("-")[1] == TRACE
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    if not lost:
                        lost = True
                        await cluster.lose_worker(cluster.pinned_to("s"))
        anybody = await http.get("/health", headers=PARENT)
        assert "traceparent" not in anybody.headers
    request, turn = receiver.one("POST /v1/completions"), receiver.one("turn")
    assert request.parent_span_id.hex() == "b7ad6b7169203331" and turn.parent_span_id == request.span_id
    assert attributes(request)["http.response.status_code"] == 200
    steps = {span.name: span for span in receiver.spans if span.parent_span_id == turn.span_id}
    assert {"admit", "place", "journal", "prefill", "decode", "fail over"} == set(steps)
    assert len(receiver.named("prefill")) == len(receiver.named("decode")) == 2, "on each of its workers"
    assert all(turn.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano for s in steps.values())
    noted = attributes(turn)
    assert noted["holdfast.session_id"] == "s" and noted["holdfast.completion_tokens"] == 40
    assert noted["holdfast.finish_reason"] == "length" and noted["holdfast.worker"].startswith("w")
    assert SECRET.encode() not in receiver.raw and text.encode() not in receiver.raw


async def test_a_migration_is_a_step_of_the_turn_that_waits_for_it(tmp_path: Path, receiver: Receiver) -> None:
    async with (
        running(tmp_path, otlp_traces_endpoint=receiver.url) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=60, headers={"X-Session-ID": "s"}) as http,
    ):
        body = {**BODY, "stream": False}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        source = cluster.router.core.fleet.worker(cluster.pinned_to("s"))
        cluster.workers[source.address.worker_id]._draining = True
        await until(lambda: source.stats.draining, 10, "a beat that says so")
        assert (await http.post("/v1/completions", json=body, headers=PARENT)).status_code == 200
        target = cluster.router.core.fleet.worker(cluster.pinned_to("s"))
        assert target is not source
    migrated, turn = receiver.one("migrate"), receiver.one("turn")
    assert migrated.parent_span_id == turn.span_id
    assert attributes(migrated) == {"source": source.name, "target": target.name}


async def test_a_call_without_a_trace_begins_one_and_a_refused_turn_says_why(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with running(tmp_path, num_workers=1, otlp_traces_endpoint=receiver.url) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
            refused = await http.post("/v1/completions", json={**BODY, "prompt": "", "stream": False})
            assert refused.status_code == 400
        async with cluster.channel() as channel:
            stub = session_pb2_grpc.SessionServiceStub(channel)
            call = stub.Generate(pb.GenerateRequest(text="x"), metadata=tuple(PARENT.items()))
            assert [answer async for answer in call]
    trace = refused.headers["traceparent"].split("-")[1]
    assert trace != TRACE
    turn = receiver.one("turn", trace)
    assert turn.status.message == "InvalidRequest" and receiver.one("admit", trace).status.message == "InvalidRequest"
    assert receiver.one("turn").parent_span_id.hex() == "b7ad6b7169203331"


async def test_a_receiver_that_is_not_there_costs_nothing_but_the_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 0.5)
    nowhere = f"http://{HOST}:{free_port()}/v1/traces"
    async with (
        running(tmp_path, num_workers=1, otlp_traces_endpoint=nowhere) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_targets[0]) as channel,
    ):
        stub = session_pb2_grpc.SessionServiceStub(channel)
        assert [answer async for answer in stub.Generate(pb.GenerateRequest(text="x"))]


def test_tracing_without_opentelemetry_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Config(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces")
    wanted.check()
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'holdfast\[tracing\]'"):
        wanted.check()
