"""SGLang's ``/generate`` with lists: each prompt's answer is the one it has alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.harness import Harness
from tests.waiting import until

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
TEXTS = ["Return the list", "Sort", "x"]


@pytest.fixture
async def http(cluster: Harness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        yield client


async def generate(http: httpx.AsyncClient, **body: Any) -> Any:
    answer = await http.post("/generate", json={"sampling_params": GREEDY} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_texts(http: httpx.AsyncClient) -> None:
    answers = await generate(http, text=TEXTS, rid="batch")
    assert [a["text"] for a in answers] == [(await generate(http, text=text))["text"] for text in TEXTS]
    assert [a["meta_info"]["id"] for a in answers] == ["batch_0", "batch_1", "batch_2"]
    assert all(a["meta_info"]["finish_reason"] == {"type": "length", "length": 6} for a in answers)


async def test_a_batch_of_one_is_a_list(http: httpx.AsyncClient) -> None:
    (answer,) = await generate(http, text=TEXTS[:1])
    assert answer["text"] == (await generate(http, text=TEXTS[0]))["text"]


async def test_each_prompt_has_its_own_parameters(http: httpx.AsyncClient) -> None:
    params = [GREEDY, GREEDY | {"max_new_tokens": 2}]
    ids = [[5, 6, 7], [8, 9]]
    answers = await generate(
        http,
        input_ids=ids,
        sampling_params=params,
        rid=["a", "b"],
        return_logprob=[True, False],
        top_logprobs_num=[2, 0],
    )
    for answer, tokens, one in zip(answers, ids, params, strict=True):
        assert answer["output_ids"] == (await generate(http, input_ids=tokens, sampling_params=one))["output_ids"]
    assert [a["meta_info"]["id"] for a in answers] == ["a", "b"]
    assert len(answers[0]["meta_info"]["output_top_logprobs"][0]) == 2
    assert "output_token_logprobs" not in answers[1]["meta_info"]


async def test_streamed_with_an_index(http: httpx.AsyncClient) -> None:
    whole = await generate(http, text=TEXTS)
    last: dict[int, Any] = {}
    async with http.stream("POST", "/generate", json={"text": TEXTS, "sampling_params": GREEDY, "stream": True}) as got:
        lines = [line.removeprefix("data: ") async for line in got.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        event = json.loads(line)
        last[event["index"]] = event
    assert [last[i]["text"] for i in range(3)] == [answer["text"] for answer in whole]


@pytest.mark.parametrize(
    "body",
    [
        {"text": []},
        {"text": ["a"] * 129},
        {"text": ["a", "b"], "input_ids": [[1], [2]]},
        {"text": ["a", "b"], "sampling_params": [GREEDY]},
        {"text": ["a", "b"], "rid": ["one"]},
        {"text": ["a", "b"], "session_params": {"id": "s"}},
        {"input_ids": [[5], [-1]]},
        {"input_ids": [[5], [5] * 5000]},
        {"text": "a", "sampling_params": [GREEDY]},
    ],
    ids=lambda body: str(body)[:60],
)
async def test_what_cannot_be_is_refused(http: httpx.AsyncClient, cluster: Harness, body: dict[str, Any]) -> None:
    answer = await http.post("/generate", json={"sampling_params": GREEDY} | body)
    assert answer.status_code == 400, answer.text
    await until(lambda: not cluster.router.core.live, 10, "the other prompts to end")


async def test_an_abort_by_prefix_ends_all_parts(http: httpx.AsyncClient, cluster: Harness) -> None:
    body = {"text": TEXTS, "rid": "long", "sampling_params": GREEDY | {"max_new_tokens": 3000}, "stream": True}
    async with http.stream("POST", "/generate", json=body) as got:
        lines = got.aiter_lines()
        await anext(lines)
        await http.post("/abort_request", json={"rid": "long"})
        events = [line async for line in lines if line]
    assert events[-1] == "data: [DONE]" and '"abort"' in events[-2]
    await until(lambda: not cluster.router.core.live, 10, "the parts to end")
