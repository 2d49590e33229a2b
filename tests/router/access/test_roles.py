"""Who may do what, over every HTTP route and every gRPC method. A new one without a rule fails here."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from click.testing import CliRunner

from cluster.cli.main import cli
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router.access.keys import StoredKey, given_key, new_key, write_keys
from router.access.rules import HTTP_RULES, METRICS, OPEN, OPERATOR, USER
from router.faces.http_app import http_app
from tests.harness import Harness, running
from tests.waiting import until

ROLES_OF = {"user": ["user"], "operator": ["operator"], "metrics": ["metrics"]}
MAY = {
    OPEN: {"nobody", "wrong", "expired", "user", "operator", "metrics", "all"},
    USER: {"user", "all"},
    OPERATOR: {"operator", "all"},
    METRICS: {"operator", "metrics", "all"},
}
SUBMIT = pb.Sampling(temperature=0, max_tokens=4, ignore_eos=True)


def keys() -> dict[str, tuple[str, StoredKey]]:
    made = {name: new_key(name, roles) for name, roles in ROLES_OF.items()}  # type: ignore[arg-type]
    made["all"] = ("admin", given_key("admin", ("user", "operator", "metrics")))
    made["expired"] = new_key("user", ["user", "operator", "metrics"], expires_at=1.0)
    return made


def routes(app: Any) -> Iterator[tuple[str, str]]:
    """Every path that is served, with its methods."""
    for route in app.routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from routes(inner)
        else:
            for method in sorted(route.methods - {"HEAD"}):
                yield method, route.path


@pytest.fixture
async def doors(tmp_path: Path) -> AsyncIterator[tuple[Harness, dict[str, str]]]:
    """A cluster, and a key of each kind."""
    made = keys()
    write_keys(tmp_path / "keys", [stored for _, stored in made.values()])
    async with running(
        tmp_path, num_workers=1, api_key_file=tmp_path / "keys", audit_log=tmp_path / "audit.log"
    ) as cluster:
        yield cluster, {name: key for name, (key, _) in made.items()} | {"wrong": "hf-nonsense", "nobody": ""}


async def test_every_route_asks_for_its_role(doors: tuple[Harness, dict[str, str]], tmp_path: Path) -> None:
    cluster, key_of = doors
    served = list(routes(http_app(cluster.router.core, lambda: "")))
    assert {path for _, path in served} == HTTP_RULES.keys(), "each path has a rule, and each rule a path"
    wrong = []
    async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as http:
        for method, path in served:
            rule = HTTP_RULES[path]
            for name, key in key_of.items():
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                body = {"mode": "in_place"} if path == "/pause_generation" else None
                answer = await http.request(method, re.sub(r"{\w+(:path)?}", "x", path), headers=headers, json=body)
                status = answer.status_code
                expected = (
                    status not in (401, 403)
                    if name in MAY[rule]
                    else status == (401 if name in ("nobody", "wrong", "expired") else 403)
                )
                if not expected or status >= 500:
                    wrong.append((method, path, name, status))
    assert not wrong
    noted = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    drains = [(line["tenant"], line["outcome"]) for line in noted if line["action"].endswith("/x/drain")]
    refused = [*[(None, "invalid_api_key")] * 3, *[(None, "permission_denied")] * 2]
    admitted = [("operator", "admitted"), (given_key("admin").tenant, "admitted")]
    assert sorted(drains, key=str) == sorted([*refused, *admitted], key=str)
    assert not any(key and key in (tmp_path / "audit.log").read_text() for key in key_of.values())


async def test_every_grpc_method_asks_for_a_user(doors: tuple[Harness, dict[str, str]]) -> None:
    cluster, key_of = doors
    service = pb.DESCRIPTOR.services_by_name["SessionService"]
    async with cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        for method in service.methods:
            for name, key in key_of.items():
                request = getattr(pb, method.input_type.name)()
                call = getattr(stub, method.name)(request, metadata=[("authorization", f"Bearer {key}")], timeout=20)
                code = await outcome(call)
                if name in MAY[USER]:
                    assert code not in ("UNAUTHENTICATED", "PERMISSION_DENIED", "INTERNAL", "UNKNOWN"), method.name
                else:
                    expected = "UNAUTHENTICATED" if name in ("nobody", "wrong", "expired") else "PERMISSION_DENIED"
                    assert code == expected, (method.name, name)


ROUTERS_COMMANDS = {
    "status": (OPERATOR, []),
    "audit": (OPERATOR, []),
    "top": (OPERATOR, ["--count", "1"]),
    "drain": (OPERATOR, ["w9"]),
    "sessions": (USER, []),
    "chat": (USER, ["--max-tokens", "2"]),
    "bench": (USER, ["--sessions", "1", "--turns", "1", "--output-tokens", "2"]),
    # Last: the worker that it stops does not come back here, and the others would wait for one.
    "restart": (OPERATOR, ["--start-timeout", "0.1", "--timeout", "0"]),
}
LOCAL_COMMANDS = {"serve", "stop", "upgrade", "join", "keys", "chaos", "tune"}
"""What they do needs no router's permission: they start and end processes on Ray, whose access is Ray's, or read and
write files. ``upgrade`` restarts workers as ``restart`` does: test_supervisors asks it without a key."""


async def test_every_command_asks_for_its_role(doors: tuple[Harness, dict[str, str]]) -> None:
    cluster, key_of = doors
    assert cli.commands.keys() == ROUTERS_COMMANDS.keys() | LOCAL_COMMANDS
    wrong = []
    for command, (rule, words) in ROUTERS_COMMANDS.items():
        for name, key in key_of.items():
            if command == "restart" and name == "operator":
                continue  # the key with all roles ends the worker, which does not come back here
            line = [command, *words, "--url", cluster.url, *(["--api-key", key] if key else [])]
            done = await asyncio.to_thread(CliRunner().invoke, cli, line, input="hi\n")
            said = f"{done.output} {done.exception}"
            refused = re.search(r"answered 40[13]", said) is not None or "lacks the role" in said or "API key" in said
            if refused == (name in MAY[rule]):
                wrong.append((command, name, done.exit_code, said[:200]))
    assert not wrong


async def outcome(call: Any) -> str:
    try:
        if hasattr(call, "read"):
            await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_a_key_is_asked_for_before_the_body_is_read(doors: tuple[Harness, dict[str, str]]) -> None:
    cluster, _ = doors
    reader, writer = await asyncio.open_connection(*cluster.url.removeprefix("http://").split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    assert b"401" in await asyncio.wait_for(reader.readline(), 5)
    writer.close()


async def turn(stub: Any, key: str, session: str, text: str) -> str:
    request = pb.GenerateRequest(session_id=session, text=text, sampling=SUBMIT)
    metadata = [("authorization", f"Bearer {key}")]
    return "".join([answer.text async for answer in stub.Generate(request, metadata=metadata)])


async def test_two_tenants_use_the_same_ids_and_learn_nothing_of_each_other(tmp_path: Path) -> None:
    async with (
        running(tmp_path, num_workers=1, api_keys=(given_key("a"), given_key("b"))) as cluster,
        cluster.channel() as channel,
        httpx.AsyncClient(base_url=cluster.url, timeout=30) as http,
    ):
        stub = session_pb2_grpc.SessionServiceStub(channel)
        said = {key: await turn(stub, key, "s", f"{key} has a secret") for key in ("a", "b")}
        again = {key: await turn(stub, key, "s", " and") for key in ("a", "b")}
        for key in ("a", "b"):
            alone = f"alone-{key}"
            assert await turn(stub, key, alone, f"{key} has a secret") == said[key]
            assert await turn(stub, key, alone, " and") == again[key]
        headers = {key: {"Authorization": f"Bearer {key}"} for key in ("a", "b")}
        listed = (await http.get("/holdfast/sessions", headers=headers["a"])).json()
        assert sorted(session["session_id"] for session in listed) == ["alone-a", "s"]
        await stub.Release(pb.ReleaseRequest(session_id="s"), metadata=[("authorization", "Bearer a")])
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await turn(stub, "a", "s", "x")
        assert gone.value.details() == "session s was released", "its own name for it, and nothing of the tenant's"
        assert await turn(stub, "b", "s", " more"), "the other's is there"
        opened = [(await http.post("/open_session", json={"session_id": "x"}, headers=headers[k])).json() for k in "ab"]
        assert opened == ["x", "x"]
        other = await http.post("/close_session", json={"session_id": "alone-b"}, headers=headers["a"])
        never = await http.post("/close_session", json={"session_id": "never-there"}, headers=headers["a"])
        assert other.status_code == never.status_code and other.text.replace("alone-b", "never-there") == never.text


async def test_a_turns_id_is_its_tenants(tmp_path: Path) -> None:
    async with (
        running(tmp_path, num_workers=1, api_keys=(given_key("a"), given_key("b"))) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=60) as http,
    ):
        body = {"text": "Return", "rid": "same", "sampling_params": {"max_new_tokens": 600, "ignore_eos": True}}
        headers = {key: {"Authorization": f"Bearer {key}"} for key in ("a", "b")}
        both = [asyncio.create_task(http.post("/generate", json=body, headers=headers[key])) for key in ("a", "b")]
        live = cluster.router.core.live
        await until(lambda: len(live) == 2, 10, "both to run")
        await http.post("/abort_request", json={"abort_all": True}, headers=headers["a"])
        ended = [answer.json()["meta_info"]["finish_reason"]["type"] for answer in [await task for task in both]]
        assert ended == ["abort", "length"]


async def test_a_tenants_flush_drops_its_own_kv_alone(tmp_path: Path) -> None:
    async with (
        running(
            tmp_path, num_workers=1, api_keys=(given_key("a"), given_key("b"), given_key("boss", ("operator", "user")))
        ) as cluster,
        cluster.channel() as channel,
        httpx.AsyncClient(base_url=cluster.url, timeout=30) as http,
    ):
        stub = session_pb2_grpc.SessionServiceStub(channel)
        long = " ".join(f"word {i}" for i in range(40))
        cache = cluster.workers["w0"]._leader.cache

        def cached_of(tenant: str) -> int:
            return len(cache.index.root(given_key(tenant).tenant).children)

        for key in ("a", "b"):
            await turn(stub, key, "s", long)
        await cluster.assert_no_leak()
        assert cached_of("a") and cached_of("b") and len(cache.slots) == 2
        assert (await http.post("/flush_cache", headers={"Authorization": "Bearer a"})).status_code == 200
        assert not cached_of("a") and cached_of("b") and len(cache.slots) == 1
        assert await turn(stub, "a", "s", " and"), "its history is computed again"
        await http.post("/flush_cache", headers={"Authorization": "Bearer boss"})
        await until(lambda: not cache.slots, 5, "an operator's flush to drop all")
        assert not cached_of("b")
        await cluster.assert_no_leak()


async def test_a_tenant_that_used_its_minute_waits(tmp_path: Path) -> None:
    key, stored = new_key("a")
    limited = stored.model_copy(update={"limits": stored.limits.model_copy(update={"tokens_per_min": 20})})
    async with (
        running(tmp_path, num_workers=1, api_keys=(limited, given_key("b"))) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=30) as http,
    ):
        body = {"prompt": " ".join(f"word {i}" for i in range(40)), "max_tokens": 4}
        answers = [
            await http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {given}"})
            for given in (key, key, "b")
        ]
        assert [answer.status_code for answer in answers] == [200, 429, 200]
        refused = answers[1]
        assert refused.json()["error"]["code"] == "too_many_tokens" and int(refused.headers["retry-after"]) > 60
