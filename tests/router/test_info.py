"""The endpoints beside generation: server information, tokenizing, and tool calls in a chat's history."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness import Harness, running
from tests.waiting import until


@pytest.fixture
async def http(cluster: Harness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        yield client


async def test_what_is_served_has_both_names(cluster: Harness, http: httpx.AsyncClient) -> None:
    for name in ("model_info", "server_info"):
        answers = [(await http.get(path)).json() for path in (f"/{name}", f"/get_{name}")]
        assert answers[0] == answers[1] and answers[0]["served_model_name"] == "holdfast-tiny"
    links = cluster.router.core.fleet.alive()
    await until(lambda: all(link.stats.groups for link in links), 10, "the workers' first beats")
    info = (await http.get("/server_info")).json()
    assert info["workers"] == ["w0@1", "w1@1"] and isinstance(info["version"], str)
    assert info["page_size"] == 16 and info["max_total_num_tokens"] == 16 * links[0].stats.groups[0].total


async def test_health_generate_needs_a_worker(tmp_path: Path) -> None:
    async with (
        running(tmp_path, num_workers=1, worker_wait_s=1.0) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=60) as http,
    ):
        assert (await http.get("/health_generate")).status_code == 200
        await cluster.lose_worker("w0")
        await cluster.router.set_workers([])
        assert (await http.get("/health_generate")).status_code == 503


async def test_the_description_and_its_page(http: httpx.AsyncClient) -> None:
    description = (await http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"} <= set(description["paths"])
    page = await http.get("/docs")
    assert page.status_code == 200 and "/openapi.json" in page.text and "https://" not in page.text


async def test_tokens_and_texts(http: httpx.AsyncClient) -> None:
    text = "Return the list."
    one = (await http.post("/tokenize", json={"prompt": text})).json()
    assert one["count"] == len(one["tokens"]) > 0 and one["max_model_len"] > 0
    both = (await http.post("/v1/tokenize", json={"prompt": [text, "x"], "model": "holdfast-tiny"})).json()
    assert both["tokens"][0] == one["tokens"] and both["count"] == [len(part) for part in both["tokens"]]
    back = (await http.post("/detokenize", json={"tokens": one["tokens"]})).json()
    assert back["text"] == back["prompt"] == text
    assert (await http.post("/v1/detokenize", json={"tokens": both["tokens"]})).json()["text"] == [text, "x"]
    messages = [{"role": "user", "content": "hi"}]
    chat = (await http.post("/tokenize", json={"messages": messages})).json()
    used = (await http.post("/v1/chat/completions", json={"model": "holdfast-tiny", "messages": messages})).json()
    assert chat["count"] == used["usage"]["prompt_tokens"]


async def test_tokens_of_a_chat(http: httpx.AsyncClient) -> None:
    async def tokens(**more: Any) -> Any:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello"}]
        return (await http.post("/tokenize", json={"messages": messages} | more)).json()

    whole = await tokens(return_token_strs=True)
    assert "".join(whole["token_strs"]).endswith("<|assistant|>")
    assert (await tokens(add_generation_prompt=False))["tokens"] == whole["tokens"][:-1]
    continued = (await tokens(continue_final_message=True))["tokens"]
    assert continued == whole["tokens"][: len(continued)] and len(continued) < len(whole["tokens"]) - 1


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": [{"content": "x"}]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {"tokens": [[5], [10**6]]}),
    ],
)
async def test_bad_input_is_named(http: httpx.AsyncClient, path: str, sent: dict[str, Any]) -> None:
    answer = await http.post(path, json=sent)
    assert answer.status_code == 400, answer.text
    assert "error" in answer.json()


def history(**call: Any) -> dict[str, Any]:
    return {
        "model": "holdfast-tiny",
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": "What does list.sort do?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function"} | call]},
            {"role": "user", "content": "Thanks."},
        ],
    }


async def test_an_assistant_may_have_called_tools(http: httpx.AsyncClient) -> None:
    called = history(function={"name": "look", "arguments": '{"at": "list.sort"}'})
    assert (await http.post("/v1/chat/completions", json=called)).status_code == 200


@pytest.mark.parametrize("call", [{}, {"function": {}}, {"function": {"name": "look", "arguments": "{"}}], ids=str)
async def test_a_malformed_tool_call_is_refused(http: httpx.AsyncClient, call: dict[str, Any]) -> None:
    answer = await http.post("/v1/chat/completions", json=history(**call))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


async def test_an_answer_has_its_request_s_id(http: httpx.AsyncClient) -> None:
    for path, given in (("/v1/models", "mine"), ("/health", "x" * 256), ("/v1/nothing", "a b")):
        headers = (await http.get(path, headers={"X-Request-ID": given})).headers
        assert headers.get_list("x-request-id") == headers.get_list("request-id") == [given]
    own = [(await http.get("/v1/models", headers=h)).headers["x-request-id"] for h in ({}, {"X-Request-ID": "x" * 257})]
    assert all(len(request_id) == 32 for request_id in own) and own[0] != own[1]


async def test_version_and_load(cluster: Harness, http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json()["version"] == (await http.get("/server_info")).json()["version"]
    assert (await http.get("/load")).json() == {"server_load": 0}
    body = {"model": "holdfast-tiny", "prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200 and (await http.get("/load")).json() == {"server_load": 1}
    await until(lambda: cluster.router.core.live.num_turns == 0, 10, "the turn of a client that left to end")
