"""SGLang's logprobs, several answers of a prompt, and the endpoints beside generation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.harness import Harness
from tests.waiting import until

GREEDY = {"temperature": 0, "max_new_tokens": 4}
PROMPT = [443, 271, 274, 441]
SCORED: dict[str, Any] = {
    "input_ids": PROMPT,
    "sampling_params": GREEDY,
    "return_logprob": True,
    "logprob_start_len": 0,
}


@pytest.fixture
async def http(cluster: Harness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        yield client


async def generate(http: httpx.AsyncClient, **body: Any) -> Any:
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_lists_of_tuples(http: httpx.AsyncClient) -> None:
    body = SCORED | {"top_logprobs_num": 2, "token_ids_logprob": [7, 9], "return_text_in_logprobs": True}
    meta = (await generate(http, **body))["meta_info"]
    entries = meta["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPT and entries[0][0] is None
    assert all(logprob <= 0 and isinstance(text, str) for logprob, _, text in entries[1:])
    for name, count in (("input", 4), ("output", 4)):
        assert len(meta[f"{name}_top_logprobs"]) == len(meta[f"{name}_token_ids_logprobs"]) == count
        for tops, wanted in zip(meta[f"{name}_top_logprobs"], meta[f"{name}_token_ids_logprobs"], strict=True):
            assert tops is wanted is None or ([entry[1] for entry in wanted] == [7, 9] and len(tops) == 2)
    top = meta["output_top_logprobs"][0][0]
    assert top == meta["output_token_logprobs"][0], "greedy takes the likeliest"


async def test_wanted_tokens_are_those_of_a_long_top_list(http: httpx.AsyncClient) -> None:
    tops = (await generate(http, **SCORED, top_logprobs_num=20))["meta_info"]["output_top_logprobs"]
    wanted = [entry[1] for entry in tops[0][5:8]]
    meta = (await generate(http, **SCORED, token_ids_logprob=wanted))["meta_info"]
    for given, expected in zip(meta["output_token_ids_logprobs"][0], tops[0][5:8], strict=True):
        assert given[0] == pytest.approx(expected[0], abs=1e-5) and given[1] == expected[1]


async def test_scoring_alone(http: httpx.AsyncClient) -> None:
    whole = (await generate(http, **SCORED))["meta_info"]
    scored = await generate(http, **SCORED | {"sampling_params": {"max_new_tokens": 0}})
    assert scored["text"] == "" and scored["meta_info"]["completion_tokens"] == 0
    for given, expected in zip(scored["meta_info"]["input_token_logprobs"], whole["input_token_logprobs"], strict=True):
        assert given == pytest.approx(expected, abs=1e-4)


async def test_a_streaming_session_scores_only_what_is_new(http: httpx.AsyncClient) -> None:
    session = (await http.post("/open_session", json={"streaming": True})).json()
    tokens, scores, cached = list[int](), list[float | None](), list[int]()
    for turn in range(3):
        given = [*PROMPT, 100 + turn]
        answer = await generate(http, **SCORED | {"input_ids": given, "session_params": {"id": session}})
        meta = answer["meta_info"]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == given
        cached.append(meta["cached_tokens"])
        scores += [entry[0] for entry in meta["input_token_logprobs"] + meta["output_token_logprobs"]]
        tokens += given + answer["output_ids"]
    assert cached[1] >= 8 and cached[2] >= 17, "no history is computed again"
    whole = (await generate(http, **SCORED | {"input_ids": tokens}))["meta_info"]["input_token_logprobs"]
    firsts = {0, 9, 18}
    assert [scores[i] for i in firsts] == [None] * 3, "as SGLang: a turn's first token has none"
    assert all(scores[i] == whole[i][0] for i in range(len(tokens)) if i not in firsts), "bit for bit"


async def test_ragged_over_a_batch(http: httpx.AsyncClient) -> None:
    body = SCORED | {"input_ids": [PROMPT, PROMPT[:2]], "token_ids_logprob": [[7], None], "top_logprobs_num": [0, 3]}
    first, second = await generate(http, **body)
    assert len(first["meta_info"]["input_token_ids_logprobs"]) == 4
    assert "input_token_ids_logprobs" not in second["meta_info"]
    assert [len(tops) for tops in second["meta_info"]["output_top_logprobs"]] == [3] * 4
    both = await generate(http, **body | {"token_ids_logprob": [7, 9]})
    assert all(len(answer["meta_info"]["output_token_ids_logprobs"][0]) == 2 for answer in both)


async def test_several_answers_of_a_prompt(http: httpx.AsyncClient) -> None:
    params = {"temperature": 1, "max_new_tokens": 6, "sampling_seed": 5, "n": 3}
    answers = await generate(http, text="Return the", sampling_params=params)
    alone = [
        await generate(http, text="Return the", sampling_params=params | {"n": 1, "sampling_seed": 5 + i})
        for i in range(3)
    ]
    assert [answer["text"] for answer in answers] == [answer["text"] for answer in alone]
    assert len(await generate(http, text=["Return the", "Sort"], sampling_params=params)) == 6


async def test_special_tokens_in_the_text(http: httpx.AsyncClient) -> None:
    params = {"max_new_tokens": 3, "logit_bias": {"2": 100}}
    assert (await generate(http, text="x", sampling_params=params))["text"] == ""
    shown = await generate(http, text="x", sampling_params=params | {"skip_special_tokens": False})
    assert shown["text"] == "<|user|>" * 3
    stopped = await generate(http, text="x", sampling_params=params | {"stop": "<|user|>", "no_stop_trim": True})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


async def test_finished_texts_are_parsed(http: httpx.AsyncClient) -> None:
    text = 'So.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "e"}}, {"type": "function", "function": {"name": "f"}}]
    body = {"text": text, "tools": tools, "tool_call_parser": "qwen25"}
    parsed = (await http.post("/parse_function_call", json=body)).json()
    assert parsed == {"normal_text": "So.\n", "calls": [{"tool_index": 1, "name": "f", "parameters": '{"x": 1}'}]}
    body = {"text": "<think>Hm.</think>Yes", "reasoning_parser": "qwen3"}
    assert (await http.post("/separate_reasoning", json=body)).json() == {"reasoning_text": "Hm.", "text": "Yes"}
    refused = await http.post("/separate_reasoning", json=body | {"reasoning_parser": "x"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning_parser"


async def test_loads(cluster: Harness, http: httpx.AsyncClient) -> None:
    links = cluster.router.core.fleet.alive()
    await until(lambda: all(link.stats.groups for link in links), 10, "the workers' first beats")
    loads = (await http.get("/v1/loads")).json()["loads"]
    assert [load["dp_rank"] for load in loads] == [0, 1]
    assert all(load["num_running_reqs"] == 0 and load["pages_by_group"]["full"]["total"] > 0 for load in loads)


async def test_an_unknown_path_says_what_there_is(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/embeddings", json={})
    assert answer.status_code == 404
    assert "/v1/chat/completions" in answer.json()["error"]["message"] and answer.json()["error"]["type"]


@pytest.mark.parametrize(
    "body",
    [
        {"sampling_params": {"n": 0}},
        {"sampling_params": {"n": 129}},
        {"sampling_params": {"n": 2}, "session_params": {"id": "s"}},
        {"sampling_params": {"max_new_tokens": -1}},
        {"sampling_params": {"min_new_tokens": -1}},
        {"sampling_params": {"stop_regex": "a("}},
        {"sampling_params": {"stop_regex": ["x"] * 17}},
        {"token_ids_logprob": [-1], "return_logprob": True},
        {"token_ids_logprob": [5000], "return_logprob": True},
        {"token_ids_logprob": [[1], [2]], "return_logprob": True},
        {"token_ids_logprob": list(range(2000)), "return_logprob": True},
        {"text": None, "input_ids": [5, 6], "logprob_start_len": 3, "return_logprob": True},
    ],
    ids=lambda body: str(body)[:60],
)
async def test_what_cannot_be_is_refused(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert (await http.post("/generate", json={"text": "x"} | body)).status_code == 400
