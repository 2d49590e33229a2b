"""Random bodies, headers, ids and bytes: no 5xx, no crash, and nothing of another tenant's."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from holdfast.v1 import session_pb2 as pb
from router.access.keys import given_key
from router.access.rules import HTTP_RULES, USER
from tests.harness import Harness, running

FEW, MANY = 400, 10_000
SECRET = "the zebra sleeps at 7f3a91"
KEYS = {name: {"Authorization": f"Bearer {name}"} for name in ("mine", "other")}
SHORT = {"max_tokens": 2, "max_output_tokens": 2, "model": "holdfast-tiny"}
SAY = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": SHORT | {"prompt": "Return", "logprobs": 1, "stop": ["x"], "seed": 3},
    "/v1/chat/completions": SHORT | {"messages": SAY, "stream": True, "tools": [], "temperature": 0.5},
    "/v1/responses": SHORT | {"input": SAY, "store": True, "metadata": {"a": "b"}},
    "/v1/messages": SHORT | {"messages": SAY, "system": "be brief"},
    "/v1/messages/count_tokens": SHORT | {"messages": SAY},
    "/generate": {"text": "Return", "sampling_params": {"max_new_tokens": 2, "regex": "[a-z]+"}, "rid": "r"},
    "/v1/conversations": {"items": [{"type": "message", "role": "user", "content": "hi"}], "metadata": {}},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/tokenize": {"prompt": ["a", "b"]},
    "/detokenize": {"tokens": [[1, 2], [3]]},
    "/open_session": {"session_id": "x", "capacity_of_str_len": 10},
    "/close_session": {"session_id": "x"},
    "/abort_request": {"rid": "x"},
    "/parse_function_call": {"text": "x", "tools": [], "tool_call_parser": "qwen25"},
    "/separate_reasoning": {"text": "x", "reasoning_parser": "qwen3"},
}
ODD = (
    None,
    True,
    -1,
    0,
    10**40,
    -(10**18),
    1e308,
    "",
    "\u0000",
    "\ud800",
    "𝄞" * 50,
    [],
    {},
    [[]],
    {"": {"": None}},
    "x" * 5000,
)


@pytest.fixture
async def doors(tmp_path: Path) -> AsyncIterator[tuple[Harness, httpx.AsyncClient]]:
    """A cluster where another tenant has a session, a response and a conversation with a secret in them."""
    async with (
        running(tmp_path, num_workers=1, api_keys=tuple(map(given_key, KEYS))) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=60, headers=KEYS["mine"]) as http,
    ):
        theirs = KEYS["other"]
        for path, body in (
            ("/v1/responses", SHORT | {"input": SECRET}),
            ("/v1/conversations", {"items": [{"type": "message", "role": "user", "content": SECRET}]}),
            ("/v1/completions", SHORT | {"prompt": SECRET}),
        ):
            headers = theirs | {"X-Session-ID": "hidden"}
            assert (await http.post(path, json=body, headers=headers)).status_code == 200
        yield cluster, http
        await cluster.assert_no_leak()


def mutated(rng: random.Random, value: Any) -> Any:
    """A part of it is something else, is missing, or is there twice."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(4):
            case 0:
                del changed[name]
            case 1:
                changed[rng.choice(string.ascii_letters) * rng.randint(1, 300)] = rng.choice(ODD)
            case _:
                changed[name] = mutated(rng, value[name])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        changed_list = list(value)
        at = rng.randrange(len(value))
        changed_list[at] = mutated(rng, value[at])
        return changed_list * rng.choice((1, 1, 3))
    return rng.choice(ODD)


def body_bytes(rng: random.Random, body: Any) -> bytes:
    """JSON of a mutated body, of which bytes may be wrong too."""
    for _ in range(rng.randint(1, 3)):
        body = mutated(rng, body)
    data = bytearray(json.dumps(body).encode())
    match rng.randrange(8):
        case 0:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            return rng.choice((b"[" * 3000, b'{"a":' * 3000, rng.randbytes(50), b"", b"NaN", b"\xff\xfe\x00"))
    return bytes(data)


async def play(num: int, one: Callable[[int], Any]) -> None:
    """Eight at a time."""
    numbers = iter(range(num))

    async def some() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(some() for _ in range(8)))


async def test_bodies_and_headers(doors: tuple[Harness, httpx.AsyncClient], long: bool) -> None:
    _, http = doors
    paths = list(BODIES)
    assert set(paths) <= {path for path, rule in HTTP_RULES.items() if rule == USER}
    wrong: list[Any] = []

    async def one(number: int) -> None:
        rng = random.Random(number)
        path = rng.choice(paths)
        headers = {
            "content-type": rng.choice(("application/json", "application/json", "text/plain", "multipart/form-data"))
        }
        if rng.random() < 0.5:
            # An id of another tenant is an id like any other.
            headers["X-Session-ID"] = rng.choice(
                ("hidden", "", "a" * 300, "\u00e9\u00fc", "a/b?c", f"s{rng.randrange(5)}")
            )
        if rng.random() < 0.1:
            headers[rng.choice(("Last-Event-ID", "X-Request-ID", "Accept"))] = "x" * rng.choice((0, 10, 5000))
        content = body_bytes(rng, BODIES[path])
        named = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = await http.post(path, content=content, headers=named)
        if answer.status_code >= 500 or SECRET in answer.text:
            wrong.append((path, headers, content, answer.status_code, answer.text[:200]))

    await play(MANY if long else FEW, one)
    assert not wrong
    assert (await http.post("/v1/completions", json=SHORT | {"prompt": "x"})).status_code == 200


async def test_ids_in_paths_and_places_in_streams(doors: tuple[Harness, httpx.AsyncClient], long: bool) -> None:
    _, http = doors
    kinds = [path for path, rule in HTTP_RULES.items() if rule == USER and "{" in path]
    mine = (await http.post("/v1/responses", json=SHORT | {"input": "x"})).json()["id"]
    theirs = (await http.post("/v1/responses", json=SHORT | {"input": SECRET}, headers=KEYS["other"])).json()["id"]
    wrong: list[Any] = []

    async def one(number: int) -> None:
        rng = random.Random(number)
        path = rng.choice(kinds)
        for name in ("response_id", "conversation_id", "item_id", "file_id", "batch_id", "session_id", "name:path"):
            given = rng.choice(("x", theirs, "hidden", "%00", "..%2f..", "é" * 20, "a" * 500, "' OR 1=1", "*", "resp_"))
            path = path.replace(f"{{{name}}}", given)
        if rng.random() < 0.3:
            path = f"/v1/responses/{mine}"
        query = {
            name: str(rng.choice((*ODD[:9], "abc", 10**30, "-1")))
            for name in ("stream", "starting_after", "after", "limit", "order", "include[]")
            if rng.random() < 0.4
        }
        method = rng.choice(("GET", "POST", "DELETE")) if mine not in path else "GET"
        try:
            answer = await http.request(method, path, params=query)
        except (httpx.InvalidURL, UnicodeEncodeError):
            return  # never sent
        if answer.status_code >= 500 or SECRET in answer.text:
            wrong.append((method, path, query, answer.status_code, answer.text[:200]))

    await play(MANY if long else FEW, one)
    assert not wrong
    kept = await http.get(f"/v1/responses/{theirs}", headers=KEYS["other"])
    assert kept.status_code == 200, "nobody else could delete it"


async def test_bytes_over_grpc(doors: tuple[Harness, httpx.AsyncClient], long: bool) -> None:
    cluster, _ = doors
    service = pb.DESCRIPTOR.services_by_name["SessionService"]
    metadata = [("authorization", "Bearer mine")]
    sampling = pb.Sampling(max_tokens=2)
    valid = {
        "Generate": pb.GenerateRequest(session_id="hidden", text="x", sampling=sampling),
        "Open": pb.OpenRequest(session_id="hidden"),
        "Fork": pb.ForkRequest(session_id="hidden", child_id="c", at_len=1),
    }
    wrong: list[Any] = []
    async with cluster.channel() as channel:

        async def one(number: int) -> None:
            rng = random.Random(number)
            method = rng.choice(service.methods)
            message = valid.get(method.name) or method.input_type._concrete_class()
            if "session_id" in method.input_type.fields_by_name:
                message.session_id = "hidden"
            data = bytearray(message.SerializeToString())
            for _ in range(rng.randint(0, 5)):
                at = rng.randrange(len(data) + 1)
                data[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 3))
            path = f"/holdfast.v1.SessionService/{method.name}"
            try:
                if method.server_streaming:
                    call = channel.unary_stream(path)(bytes(data), metadata=metadata, timeout=20)
                    answers = [answer async for answer in call]
                else:
                    answers = [await channel.unary_unary(path)(bytes(data), metadata=metadata, timeout=20)]
            except grpc.aio.AioRpcError as error:
                if error.code().name in ("UNKNOWN", "INTERNAL", "UNAVAILABLE"):
                    wrong.append((method.name, bytes(data), error.code().name, error.details()))
                answers = [(error.details() or "").encode()]
            if any(SECRET.encode() in answer for answer in answers):
                wrong.append((method.name, bytes(data), answers))

        await play(MANY if long else FEW, one)
    assert not wrong
