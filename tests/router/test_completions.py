"""Plain completions in full: echo, logprobs of the prompt, best_of, token ids, stops."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.harness import Harness
from workers.scheduling import Turn

MODEL, PROMPT = "holdfast-tiny", "Return the sorted"
SAY: Any = [{"role": "user", "content": "What does list.sort do?"}]
SESSION = {"X-Session-ID": "s"}


@pytest.fixture
async def client(cluster: Harness) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def complete(client: AsyncOpenAI, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0.0} | more
    return await client.completions.create(**asked)


async def test_echo_and_the_prompt_s_logprobs(client: AsyncOpenAI) -> None:
    plain = (await complete(client, logprobs=2)).choices[0]
    echoed = await complete(client, echo=True, logprobs=2)
    choice = echoed.choices[0]
    assert choice.text == PROMPT + plain.text
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    num_prompt = echoed.usage.prompt_tokens
    assert len(choice.logprobs.tokens) == num_prompt + 8
    assert choice.logprobs.token_logprobs[num_prompt:] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
    assert all(
        choice.text[at:].startswith(t)
        for at, t in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
    )


async def test_scoring_alone(client: AsyncOpenAI) -> None:
    """As evaluation harnesses ask for it: no output at all."""
    scored = await complete(client, echo=True, logprobs=1, max_tokens=0)
    longer = await complete(client, echo=True, logprobs=1, max_tokens=1)
    assert scored.choices[0].text == PROMPT and scored.usage.completion_tokens == 0
    assert scored.choices[0].finish_reason == "length"
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        longer.choices[0].logprobs.token_logprobs[1:-1], abs=1e-4
    )
    on_session = await complete(client, max_tokens=0, extra_headers=SESSION)
    assert on_session.choices[0].text == ""
    again = await complete(client, extra_headers=SESSION)
    assert again.choices[0].text == (await complete(client)).choices[0].text


async def test_streamed_echo(client: AsyncOpenAI) -> None:
    whole = (await complete(client, echo=True, logprobs=1)).choices[0]
    text, tokens, offsets = "", [], []
    async for chunk in await complete(client, echo=True, logprobs=1, stream=True):
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs:
            tokens += chunk.choices[0].logprobs.tokens
            offsets += chunk.choices[0].logprobs.text_offset
    assert (text, tokens, offsets) == (whole.text, whole.logprobs.tokens, whole.logprobs.text_offset)


async def test_prompt_logprobs_and_token_ids(client: AsyncOpenAI) -> None:
    answer = await complete(client, extra_body={"prompt_logprobs": 2, "return_token_ids": True})
    choice = answer.choices[0].model_dump()
    assert len(choice["token_ids"]) == 8 and len(choice["prompt_token_ids"]) == answer.usage.prompt_tokens
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == answer.usage.prompt_tokens - 1
    for token, known in zip(choice["prompt_token_ids"][1:], others, strict=True):
        own = known[str(token)]
        assert own["logprob"] <= 0 and 2 <= len(known) <= 3
        assert sorted(entry["rank"] for entry in known.values())[:2] == [1, 2]
        assert (own["rank"] > 2) == (len(known) == 3)
    assert choice["logprobs"] is None


async def test_prompt_logprobs_of_a_chat(client: AsyncOpenAI) -> None:
    more: dict[str, Any] = {"extra_body": {"prompt_logprobs": 1}}
    for n in (1, 2):
        answer = await client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=2, n=n, **more)
        first, *others = answer.model_dump()["prompt_logprobs"]
        assert first is None and len(others) == answer.usage.prompt_tokens - 1
        assert answer.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=SAY, stream=True, **more)
    assert refused.value.param == "prompt_logprobs"


async def test_token_ids_of_a_chat(client: AsyncOpenAI) -> None:
    more: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "extra_body": {"return_token_ids": True}}
    for n in (1, 2):
        whole = (await client.chat.completions.create(model=MODEL, messages=SAY, n=n, **more)).model_dump()
        assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"] and whole["prompt_logprobs"] is None
        streamed: dict[int, list[int]] = {}
        async for chunk in await client.chat.completions.create(model=MODEL, messages=SAY, n=n, stream=True, **more):
            (choice,) = chunk.model_dump()["choices"]
            if choice["index"] not in streamed:
                assert chunk.model_dump()["prompt_token_ids"] == whole["prompt_token_ids"]
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
        assert streamed == {choice["index"]: choice["token_ids"] for choice in whole["choices"]}


async def test_best_of_returns_the_likeliest(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logprobs": 0}
    every = (await complete(client, n=5, **asked)).choices
    best = await complete(client, n=2, best_of=5, **asked)

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    assert [c.text for c in best.choices] == [c.text for c in sorted(every, key=mean, reverse=True)[:2]]
    assert best.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in every)


@pytest.mark.parametrize("stream", [False, True])
async def test_n_on_a_session(cluster: Harness, client: AsyncOpenAI, stream: bool) -> None:
    """The first choice becomes the session; the others leave nothing."""
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "extra_headers": SESSION}
    messages = list(SAY)
    for turn in range(3):
        alone = await client.chat.completions.create(model=MODEL, max_tokens=8, messages=messages, seed=turn)
        if stream:
            texts = ["", "", ""]
            async for chunk in await client.chat.completions.create(
                messages=messages, n=3, seed=turn, stream=True, **asked
            ):
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        else:
            answer = await client.chat.completions.create(messages=messages, n=3, seed=turn, **asked)
            texts = [choice.message.content for choice in answer.choices]
            if turn:
                assert answer.usage.prompt_tokens_details.cached_tokens > 10
        assert texts[0] == alone.choices[0].message.content and len(set(texts)) > 1
        messages += [{"role": "assistant", "content": texts[0]}, *SAY]
    await only_session(cluster, "s")


async def only_session(cluster: Harness, session_id: str) -> None:
    """Wait until the forks are released."""
    journal, deadline = cluster.router.core.journal, asyncio.get_running_loop().time() + 10
    while [record.session_id for record, _, _ in await journal.list_sessions("")] != [session_id]:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


async def test_a_client_that_leaves_leaves_no_forks(cluster: Harness, client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": SAY, "extra_headers": SESSION}
    await client.chat.completions.create(max_tokens=8, **asked)
    for num_chunks in (1, 5, 20):
        stream = await client.chat.completions.create(
            max_tokens=2000, n=3, stream=True, extra_body={"ignore_eos": True}, **asked
        )
        for _ in range(num_chunks):
            await anext(stream)
        await stream.close()
        await only_session(cluster, "s")
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(
            max_tokens=2000, n=3, extra_body={"ignore_eos": True}, timeout=0.5, **asked
        )
    await only_session(cluster, "s")


async def test_a_special_token_stops(client: AsyncOpenAI) -> None:
    biased = {"logit_bias": {"2": 100.0}}
    answer = await client.chat.completions.create(model=MODEL, messages=SAY, stop="<|user|>", extra_body=biased)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content == ""
    assert answer.choices[0].model_dump()["matched_stop"] == 2
    shown = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    answer = await client.chat.completions.create(model=MODEL, messages=SAY, stop="<|user|>", extra_body=biased | shown)
    assert answer.choices[0].message.content == "<|user|>"


async def test_a_stop_string_can_be_included(client: AsyncOpenAI) -> None:
    text = (await complete(client, max_tokens=20)).choices[0].text
    stop = text[6:9]
    cut = await complete(client, max_tokens=20, stop=stop)
    kept = await complete(client, max_tokens=20, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert cut.choices[0].text == text[: text.index(stop)]
    assert kept.choices[0].text == text[: text.index(stop) + len(stop)]
    assert kept.choices[0].model_dump()["matched_stop"] == stop


async def test_usage_in_every_chunk(client: AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens async for chunk in await complete(client, stream=True, stream_options=options)
    ]
    assert counts[-1] == 8 and counts == sorted(counts) and 0 < counts[0] < 8


async def test_the_last_message_may_begin_the_answer(client: AsyncOpenAI) -> None:
    first = await client.chat.completions.create(model=MODEL, messages=SAY, temperature=0.0, max_tokens=12)
    begun: Any = [*SAY, {"role": "assistant", "content": "The sorted"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = await client.chat.completions.create(
        model=MODEL, messages=begun, temperature=0.0, max_tokens=4, extra_body=extra
    )
    plain = await complete(client, prompt="<|user|>What does list.sort do?<|end|><|assistant|>The sorted", max_tokens=4)
    assert answer.choices[0].message.content == plain.choices[0].text != first.choices[0].message.content


async def test_developer_is_a_role(client: AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0.0, "max_tokens": 8}
    texts = [
        (await client.chat.completions.create(messages=[{"role": role, "content": "Be brief."}, *SAY], **asked))  # type: ignore[misc,list-item]
        for role in ("developer", "system")
    ]
    assert texts[0].choices[0].message.content == texts[1].choices[0].message.content


async def test_fields_that_change_nothing_are_accepted(client: AsyncOpenAI) -> None:
    ignored: dict[str, Any] = {"store": True, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto"}
    answer = await client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=2, **ignored)
    assert answer.choices


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"stop_regex": "^a+"}, "stop_regex"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": None}}, "stream_options"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"n": 200}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"], "headers": SESSION}, "prompt"),
    ],
)
async def test_refusals(client: AsyncOpenAI, extra: dict[str, Any], param: str) -> None:
    headers = extra.pop("headers", None)
    with pytest.raises(openai.BadRequestError) as refused:
        await complete(client, extra_body=extra, extra_headers=headers)
    assert isinstance(refused.value.body, dict) and refused.value.body["param"] == param, refused.value.body


async def test_a_stop_pattern_ends_the_text_and_is_named(client: AsyncOpenAI) -> None:
    free = await complete(client, max_tokens=40, seed=1)
    pattern = "[a-z]{3} |[()]"
    answer = await complete(client, max_tokens=40, seed=1, extra_body={"stop_regex": pattern})
    text = answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].matched_stop == pattern
    assert free.choices[0].text.startswith(text) and re.search(pattern, text)


async def test_the_flex_tier_runs_in_the_background(client: AsyncOpenAI, cluster: Harness) -> None:
    chosen: list[bool] = []
    for worker in cluster.workers.values():
        submit = worker._leader.scheduler.submit

        def noted(turn: Turn, submit: Any = submit) -> None:
            chosen.append(turn.params.background)
            submit(turn)

        worker._leader.scheduler.submit = noted  # type: ignore[method-assign]
    for tier in ("flex", "default"):
        await client.chat.completions.create(model=MODEL, messages=SAY, max_tokens=2, service_tier=tier)
    await client.responses.create(model=MODEL, input="hi", max_output_tokens=2, service_tier="flex")
    assert chosen == [True, False, True]
