"""Several choices in one request, with the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.harness import Harness
from tests.waiting import until

MODEL = "holdfast-tiny"
SAY = [{"role": "user", "content": "What does list.sort do?"}]


@pytest.fixture
async def client(cluster: Harness) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def alone(client: AsyncOpenAI, seed: int, **more: Any) -> str:
    answer = await client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=8, seed=seed, **more)
    return answer.choices[0].message.content


async def test_choices_are_those_of_their_seeds(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=8, seed=7, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [await alone(client, 7 + i) for i in range(3)]
    one = await client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=8, seed=7)
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens, "the prompt counts once"
    assert answer.usage.completion_tokens >= one.usage.completion_tokens


async def test_streamed_equals_not_streamed(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": SAY, "max_tokens": 8, "seed": 7, "n": 3}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    texts, reasons, usage = ["", "", ""], ["", "", ""], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )


@pytest.mark.parametrize("prompts", [["Return the", "Sort a list", "x"], [[5, 6, 7], [8, 9]]], ids=["texts", "tokens"])
async def test_several_prompts(client: AsyncOpenAI, prompts: list[Any]) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0, "n": 2}
    answer = await client.completions.create(prompt=prompts, **asked)
    each = [(await client.completions.create(prompt=prompt, **asked | {"n": 1})) for prompt in prompts]
    texts = [choice.text for choice in answer.choices]
    assert texts == [text for one in each for text in [one.choices[0].text] * 2], "prompt by prompt"
    assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in each)


async def test_one_bad_prompt_ends_all(client: AsyncOpenAI, cluster: Harness) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(
                model=MODEL,
                prompt=[[5] * 20, [5] * 5000],
                max_tokens=400,
                stream=stream,
                extra_body={"ignore_eos": True},
            )
        assert caught.value.code == "context_length_exceeded"
        await until(lambda: not cluster.router.core.live, 10, "the other choices to end")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 50, "prompt": ["a", "b", "c"]}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"], "extra_headers": {"X-Session-ID": "s"}}, "prompt"),
    ],
    ids=str,
)
async def test_what_cannot_be_is_named(client: AsyncOpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**{"model": MODEL, "prompt": "x", "max_tokens": 4} | asked)
    assert caught.value.param == param
