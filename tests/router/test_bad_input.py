"""Requests that no client should send: each gets a clear answer, and nothing else is disturbed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router.faces.fields import MAX_NAME, MAX_STOP, MAX_STOPS
from tests.harness import Harness, running

HALF = "\ud800"
"""Half a surrogate pair: JSON can spell it, nothing can encode it."""
HOSTILE: list[Any] = [
    -1, 2**31, 2**63, 2**70, 1e308, float("nan"), float("inf"), True, None, "", HALF, [], {}, [None], [-1], [2**31],
    [2**70], [999_999], [HALF], ["x"] * 17, "x" * 5000,
]  # fmt: skip
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
FACES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "/v1/completions": (
        {"prompt": "Return", "max_tokens": 1, "ignore_eos": True},
        SAMPLING | {"prompt", "seed", "stop", "stop_token_ids", "min_tokens", "logprobs", "prompt_cache_key", "stream"},
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 1},
        {"messages", "seed", "stop", "stop_token_ids", "min_tokens", "logprobs", "top_logprobs"},
    ),
    "/generate": (
        {"text": "Return", "sampling_params": {"max_new_tokens": 1}},
        {"text", "input_ids", "rid", "logprob_start_len", "top_logprobs_num", "session_params", "sampling_params"},
    ),
    "/v1/responses": (
        {"input": "hi", "max_output_tokens": 1},
        {"input", "instructions", "previous_response_id", "conversation", "seed", "metadata", "top_p", "text"},
    ),
    "/v1/conversations": ({}, {"items", "metadata"}),
    "/open_session": ({"streaming": True}, {"session_id", "capacity_of_str_len"}),
    "/close_session": ({}, {"session_id"}),
    "/abort_request": ({}, {"rid"}),
}


@pytest.fixture
async def one_worker(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running(tmp_path, num_workers=1) as cluster:
        yield cluster
        assert [link.alive for link in cluster.router.core.fleet.alive()] == [True], "the worker was lost"
        await cluster.assert_no_leak()


def requests() -> list[tuple[str, dict[str, Any]]]:
    found = [
        (path, base | {field: value})
        for path, (base, fields) in FACES.items()
        for field in sorted(fields)
        for value in HOSTILE
    ]
    of_sglang = (SAMPLING - {"temperature"}) | {"stop", "stop_token_ids", "sampling_seed", "min_new_tokens"}
    for value in HOSTILE:
        for field in sorted(of_sglang):
            found.append(("/generate", {"text": "Return", "sampling_params": {"max_new_tokens": 1, field: value}}))
        for field in ("id", "rid", "offset", "replace", "drop_previous_output"):
            params = {"id": "s", field: value}
            body = {"text": "a", "session_params": params, "sampling_params": {"max_new_tokens": 1}}
            found.append(("/generate", body))
        for message in ({"role": "user", "content": value}, {"role": value, "content": "hi"}):
            found.append(("/v1/chat/completions", {"messages": [message], "max_tokens": 1}))
            found.append(("/v1/responses", {"input": [message], "max_output_tokens": 1}))
    return found


async def test_no_request_is_a_fault_of_ours(one_worker: Harness) -> None:
    wrong = []
    async with httpx.AsyncClient(base_url=one_worker.url, timeout=30) as http:
        for path, body in requests():
            answer = await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            if answer.status_code >= 500 or (answer.status_code >= 400 and not answer.json()["error"]["message"]):
                wrong.append((path, str(body)[:200], answer.status_code, answer.text[:200]))
    assert not wrong


async def test_refusals_name_the_field(one_worker: Harness) -> None:
    refused = [
        ("/v1/completions", {"prompt": [2**31]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2**31}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * (MAX_STOPS + 1)}, "stop"),
        ("/v1/completions", {"prompt": "a", "stop": "x" * (MAX_STOP + 1)}, "stop"),
        ("/v1/completions", {"prompt": HALF}, "surrogate"),
        ("/generate", {"text": "a", "rid": "x" * (MAX_NAME + 1)}, "rid"),
        ("/open_session", {"session_id": "a\nb", "streaming": True}, "session_id"),
    ]
    async with httpx.AsyncClient(base_url=one_worker.url, timeout=30) as http:
        for path, body, named in refused:
            answer = await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            assert answer.status_code == 400 and named in answer.json()["error"]["message"], answer.text
        headers = {"X-Session-ID": "x" * (MAX_NAME + 1)}
        answer = await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["param"].lower().endswith("x-session-id")
        for raw in (b'{"prompt": "\xed\xa0\x80"}', json.dumps({"prompt": "a"}).encode("utf-16"), b"[" * 100_000):
            answer = await http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text


async def test_a_turn_that_cannot_be_sampled_costs_no_worker(one_worker: Harness) -> None:
    """Its stop token is none of the model's: banning it (``min_tokens``) ended every worker that it came to."""
    session = {"X-Session-ID": "s"}
    body = {"prompt": "Return the", "max_tokens": 2, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=one_worker.url, timeout=30) as http:
        first = (await http.post("/v1/completions", json=body, headers=session)).json()["choices"][0]["text"]
        poison = body | {"prompt": "Return the" + first, "min_tokens": 1, "stop_token_ids": [999_999]}
        answer = await http.post("/v1/completions", json=poison, headers=session)
        assert answer.status_code == 400 and "stop_token_ids" in answer.json()["error"]["message"]
        # The session is as it was.
        answer = await http.post("/v1/completions", json=body | {"prompt": "Return the" + first}, headers=session)
        usage = answer.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


async def test_grpc_refuses_the_same(one_worker: Harness) -> None:
    refused = {
        "temperature": [-1.0, 1e9, float("nan")],
        "top_p": [0.0, 1.5, float("nan")],
        "min_p": [-0.1, float("nan")],
        "top_k": [-1],
        "repetition_penalty": [0.0, float("inf"), float("nan")],
        "presence_penalty": [3.0, float("inf"), float("nan")],
        "frequency_penalty": [-3.0, float("-inf"), float("nan")],
        "max_tokens": [-1],
        "min_tokens": [-1],
        "logprobs": [-1, 21],
        "stop": [[""], ["x"] * (MAX_STOPS + 1), ["x" * (MAX_STOP + 1)]],
        "stop_token_ids": [[-1], [999_999]],
    }
    async with one_worker.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        for field, values in refused.items():
            for value in values:
                sampling = pb.Sampling(**{"max_tokens": 1, "min_tokens": 1} | {field: value})
                await refuses(stub.Generate(pb.GenerateRequest(text="Return", sampling=sampling)).read(), field)
        long = "x" * (MAX_NAME + 1)
        await refuses(stub.Generate(pb.GenerateRequest(text="Return", request_id=long)).read(), "request_id")
        await refuses(stub.Generate(pb.GenerateRequest(text="Return", session_id=long)).read(), "session_id")
        await refuses(stub.Open(pb.OpenRequest(session_id="a\x00b")), "session_id")
        await stub.Open(pb.OpenRequest(session_id="a"))
        await refuses(stub.Fork(pb.ForkRequest(session_id="a", child_id=long)), "child_id")
        await refuses(stub.Release(pb.ReleaseRequest(session_id="a", mode=7)), "mode")


async def refuses(call: Any, named: str) -> None:
    try:
        await call
        raise AssertionError(f"{named} was taken")
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
        assert named in (error.details() or ""), error.details()


async def test_numbers_that_fp32_cannot_hold_sample_as_their_limit(one_worker: Harness) -> None:
    async def text(**sampling: float) -> str:
        chosen = pb.Sampling(max_tokens=8, ignore_eos=True, seed=1, **sampling)
        call = stub.Generate(pb.GenerateRequest(text="Return the", sampling=chosen))
        return "".join([answer.text async for answer in call])

    async with one_worker.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        greedy = await text()
        assert await text(temperature=1e-46) == greedy
        assert await text(temperature=0.8, top_p=1e-46) == greedy
