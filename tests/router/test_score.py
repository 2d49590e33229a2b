"""``/v1/score``: chances of tokens after texts, as a judge or a reranker asks for them."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.harness import Harness

QUERY, ITEMS, LABELS = "Return the ", ["list", "value of", ""], [443, 271, 274, 443]


@pytest.fixture
async def http(cluster: Harness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        yield client


async def score(http: httpx.AsyncClient, **more: Any) -> Any:
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | more
    answer = await http.post("/v1/score", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_scores_are_the_chances_of_the_next_token(http: httpx.AsyncClient) -> None:
    scores = (await score(http))["scores"]
    for text, of_item in zip([QUERY + item for item in ITEMS], scores, strict=True):
        body = {"text": text, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        meta = (await http.post("/generate", json=body | {"token_ids_logprob": LABELS[:3]})).json()["meta_info"]
        chances = {token: math.exp(logprob) for logprob, token, _ in meta["output_token_ids_logprobs"][0]}
        assert of_item == pytest.approx([chances[label] for label in LABELS], abs=1e-6)


async def test_over_the_labels_alone_they_are_one(http: httpx.AsyncClient) -> None:
    plain, soft = (await score(http))["scores"], (await score(http, apply_softmax=True))["scores"]
    for chances, shares in zip(plain, soft, strict=True):
        assert sum(shares) == pytest.approx(1.0, abs=1e-6)
        assert shares == pytest.approx([chance / sum(chances) for chance in chances], abs=1e-6)


async def test_a_text_that_the_model_would_end_is_scored(http: httpx.AsyncClient) -> None:
    text = "What is an LLM?"
    answer = (await http.post("/generate", json={"text": text, "sampling_params": {"temperature": 0}})).json()
    (end,) = answer["output_ids"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    ((chance, other),) = (await score(http, query=text, items=[""], label_token_ids=[end, 443]))["scores"]
    assert chance > other


async def test_tokens_and_the_item_first(http: httpx.AsyncClient) -> None:
    async def tokens(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        given: list[int] = (await http.post("/tokenize", json=body)).json()["tokens"]
        return given

    texts = await score(http, query=" list", items=["Return the", "Sort this"], item_first=True)
    ids = [await tokens(text) for text in ("Return the", "Sort this")]
    of_ids = await score(http, query=await tokens(" list"), items=ids, item_first=True)
    assert of_ids["scores"] == [pytest.approx(of_item, abs=1e-6) for of_item in texts["scores"]]
    assert of_ids["usage"]["prompt_tokens"] == of_ids["usage"]["total_tokens"] == sum(map(len, ids)) + 2 * 1
    assert of_ids["usage"]["completion_tokens"] == 0
    assert (await score(http, items=[]))["scores"] == []


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"label_token_ids": [999_999]}, "label_token_ids"),
        ({"label_token_ids": [-1]}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"items": [[5]]}, "items"),
        ({"query": [5]}, "items"),
        ({"items": ["x"] * 129}, "items"),
        ({"items": ["x " * 5000]}, None),
    ],
)
async def test_what_cannot_be_scored_is_refused(http: httpx.AsyncClient, more: dict[str, Any], param: str) -> None:
    answer = await http.post("/v1/score", json={"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | more)
    error = answer.json()["error"]
    assert answer.status_code == 400 and (param is None or (error["param"] or "").startswith(param)), error
