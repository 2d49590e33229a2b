"""Structured output through the APIs, with the official client: every text is one of its grammar."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from benchmarks.schemas import schema
from tests.harness import Harness
from tests.schemas import check

MODEL = "holdfast-tiny"
SAY: Any = [{"role": "user", "content": "What does list.sort do?"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
async def client(cluster: Harness) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def strict(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": of, "strict": True}}


async def chat(client: AsyncOpenAI, **more: Any) -> str:
    asked = {"model": MODEL, "messages": SAY, "max_tokens": 2000, "seed": 1} | more
    answer = await client.chat.completions.create(**asked)
    assert answer.choices[0].finish_reason == "stop", answer
    return answer.choices[0].message.content or ""


async def test_a_corpus_of_schemas_in_one_batch(client: AsyncOpenAI) -> None:
    """Beside turns without a grammar, whose tokens stay those that they have alone."""
    schemas = [schema(seed) for seed in range(24)]
    free: dict[str, Any] = {"model": MODEL, "messages": SAY, "max_tokens": 30, "seed": 5}
    alone = (await client.chat.completions.create(**free)).choices[0].message.content
    asked = [chat(client, response_format=strict(of), seed=seed) for seed, of in enumerate(schemas)]
    beside = [client.chat.completions.create(**free) for _ in range(4)]
    texts = await asyncio.gather(*asked)
    for text, of in zip(texts, schemas, strict=True):
        check(text, of)
    assert {answer.choices[0].message.content for answer in await asyncio.gather(*beside)} == {alone}


async def test_many_schemas_across_a_lost_worker(cluster: Harness, client: AsyncOpenAI, long: bool) -> None:
    """At temperature 1. Most of them are under way or wait when their worker is lost."""
    seeds = range(200 if long else 50)
    schemas = [schema(seed) for seed in seeds]
    num_done = 0

    async def ask(seed: int) -> str:
        nonlocal num_done
        text = await chat(client, response_format=strict(schemas[seed]), seed=seed)
        num_done += 1
        if num_done == len(seeds) // 4:
            await cluster.lose_worker("w0")
        return text

    texts = await asyncio.gather(*map(ask, seeds))
    assert num_done == len(seeds) and len(cluster.workers) == 1
    for text, of in zip(texts, schemas, strict=True):
        check(text, of)
    for seed in seeds[::25]:
        assert await chat(client, response_format=strict(schemas[seed]), seed=seed) == texts[seed]


async def test_parse_of_the_official_client(client: AsyncOpenAI) -> None:
    class Person(BaseModel):
        age: int
        admin: bool

    parsed = await client.chat.completions.parse(model=MODEL, messages=SAY, response_format=Person, seed=2)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    response = await client.responses.parse(model=MODEL, input="Who?", text_format=Person)
    assert isinstance(response.output_parsed, Person)


async def test_json_object_and_stream(client: AsyncOpenAI) -> None:
    text = ""
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=SAY,
        seed=3,
        max_tokens=400,
        temperature=0.3,
        response_format={"type": "json_object"},
        stream=True,
    )
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        finish = chunk.choices[0].finish_reason
    assert finish == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": r"[a-c]{3}-\d"}, r"[a-c]{3}-\d"),
        ({"guided_choice": ["red", 'gr"een', "<blue>"]}, r'red|gr"een|<blue>'),
        ({"guided_grammar": 'root ::= "x" [0-9] "y"'}, r"x\dy"),
        ({"guided_json": {"enum": [1, "b"]}}, '1|"b"'),
        ({"guided_json": json.dumps({"const": 7})}, "7"),
        ({"structured_outputs": {"regex": "a|b"}}, "a|b"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "q"'}}, "q"),
        ({"structured_outputs": {"json": {"type": "null"}}}, "null"),
        ({"regex": "[xyz]"}, "[xyz]"),
        ({"ebnf": 'root ::= "abc"'}, "abc"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "ok"}}},
            "ok",
        ),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
async def test_forms_of_vllm_and_sglang(client: AsyncOpenAI, extra: dict[str, Any], pattern: str) -> None:
    text = await chat(client, extra_body=extra)
    assert re.fullmatch(pattern, text), text


async def test_generate_of_sglang(cluster: Harness) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
        for params, pattern in (
            ({"regex": r"\d\d"}, r"\d\d"),
            ({"json_schema": json.dumps({"enum": [1, 2]})}, "1|2"),
            ({"ebnf": 'root ::= "k"'}, "k"),
        ):
            answer = await http.post("/generate", json={"text": "Say", "sampling_params": params})
            assert answer.status_code == 200, answer.text
            assert re.fullmatch(pattern, answer.json()["text"])


async def test_stops_do_not_cut_a_grammar(client: AsyncOpenAI) -> None:
    extra = {"ignore_eos": True, "stop_token_ids": list(range(5, 200))}
    text = await chat(client, response_format=strict(PERSON), stop=['"', "a", "1"], extra_body=extra)
    check(text, PERSON)


async def test_min_tokens_do_not_block_a_complete_text(client: AsyncOpenAI) -> None:
    assert await chat(client, extra_body={"guided_regex": "ab", "min_tokens": 50}) == "ab"


async def test_a_text_that_is_cut_by_length_says_so(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=SAY,
        max_tokens=3,
        response_format=strict(PERSON),  # type: ignore[arg-type]
    )
    assert answer.choices[0].finish_reason == "length"


async def test_a_session_keeps_what_a_grammar_wrote(client: AsyncOpenAI) -> None:
    messages: Any = list(SAY)
    for turn in range(3):
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=messages,
            seed=turn,
            max_tokens=200,
            response_format=strict(PERSON),
            extra_headers={"X-Session-ID": "s"},  # type: ignore[arg-type]
        )
        check(answer.choices[0].message.content or "", PERSON)
        if turn:
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens > 20
        messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *SAY]


@pytest.mark.parametrize(
    ("extra", "param", "said"),
    [
        (
            {"response_format": strict({"properties": {"a": {"type": "strin"}}})},
            "response_format.json_schema.schema",
            "#/properties/a",
        ),
        ({"response_format": strict({"uniqueItems": True})}, "response_format.json_schema.schema", "uniqueItems"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"guided_regex": "["}, "guided_regex", "unclosed"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_choice": []}, "guided_choice", ""),
        ({"guided_grammar": "root ::= foo"}, "guided_grammar", "foo"),
        ({"guided_regex": "a", "regex": "b"}, "regex", "only one"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", ""),
        ({"guided_regex": "a" * 300_000}, "guided_regex", ""),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
async def test_refusals(client: AsyncOpenAI, extra: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(client, extra_body=extra)
    body = refused.value.body
    assert isinstance(body, dict) and param in str(body["param"]) and said in body["message"], body
    assert await chat(client, extra_body={"guided_regex": "fine"}) == "fine"
