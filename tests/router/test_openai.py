"""The OpenAI API with the official client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.harness import Harness
from tests.waiting import until

MODEL = "holdfast-tiny"


@pytest.fixture
async def client(cluster: Harness) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def in_session(name: str) -> dict[str, str]:
    return {"X-Session-ID": name}


def say(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id for model in (await client.models.list()).data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


async def test_chat_streamed_equals_not_streamed(client: AsyncOpenAI) -> None:
    args = {"model": MODEL, "messages": say("What does os.path.join do?"), "seed": 7, "max_tokens": 40}
    whole = await client.chat.completions.create(**args, temperature=0.8)
    stream = await client.chat.completions.create(
        **args, temperature=0.8, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content and text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_session_turn_costs_only_its_new_tokens(client: AsyncOpenAI) -> None:
    history, before = [], 0
    for turn, question in enumerate(["What does list.sort do?", "And list.reverse?", "And dict.get?"]):
        history += say(question)
        answer = await client.chat.completions.create(
            model=MODEL, messages=history, temperature=0.7, seed=turn, max_tokens=24, extra_headers=in_session("s")
        )
        usage = answer.usage
        cached = usage.prompt_tokens_details.cached_tokens
        assert cached in ({0} if turn == 0 else {before, before - 1}), f"turn {turn}"
        before = usage.prompt_tokens + usage.completion_tokens
        history.append({"role": "assistant", "content": answer.choices[0].message.content})


async def test_edited_history_is_a_rewind(client: AsyncOpenAI) -> None:
    async def ask(messages: list[dict[str, str]]):
        return await client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=16, extra_headers=in_session("s")
        )

    first = await ask(say("Explain list.sort, in some detail please."))
    reply = first.choices[0].message.content
    await ask([*say("Explain list.sort, in some detail please.", reply, "Go on.")])
    edited = await ask([*say("Explain list.sort, in some detail please.", reply, "Stop it.")])
    after_first = first.usage.prompt_tokens + first.usage.completion_tokens
    assert edited.usage.prompt_tokens_details.cached_tokens >= after_first - 1
    alone = await client.chat.completions.create(
        model=MODEL,
        messages=say("Explain list.sort, in some detail please.", reply, "Stop it."),
        temperature=0,
        max_tokens=16,
    )
    assert alone.choices[0].message.content == edited.choices[0].message.content


async def test_completions_with_text_tokens_and_logprobs(client: AsyncOpenAI) -> None:
    text = await client.completions.create(model=MODEL, prompt="Return the", max_tokens=8, temperature=0, logprobs=2)
    assert text.choices[0].finish_reason in ("length", "stop")
    logprobs = text.choices[0].logprobs
    assert len(logprobs.tokens) == text.usage.completion_tokens == len(logprobs.token_logprobs)
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert max(top.values()) == pytest.approx(chosen), "greedy takes the likeliest"
    tokens = await client.completions.create(model=MODEL, prompt=[100, 200, 300], max_tokens=4, temperature=0)
    assert tokens.usage.prompt_tokens == 3


async def test_stop_string_across_token_borders(client: AsyncOpenAI) -> None:
    args = {"model": MODEL, "prompt": "Return a new list", "temperature": 0, "max_tokens": 60}
    free = (await client.completions.create(**args)).choices[0].text
    stop = free[len(free) // 2 : len(free) // 2 + 5]
    for stream in (False, True):
        answer = await client.completions.create(**args, stop=[stop], stream=stream)
        if stream:
            parts = [chunk.choices[0] async for chunk in answer]
            text, reason = "".join(p.text for p in parts), parts[-1].finish_reason
        else:
            text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert (text, reason) == (free[: free.index(stop)], "stop")


async def test_logit_bias_forces_and_bans(client: AsyncOpenAI) -> None:
    args = {"model": MODEL, "prompt": "Return the", "max_tokens": 6, "logprobs": 0}
    free = (await client.completions.create(**args, temperature=0)).choices[0]
    forced = await client.completions.create(**args, logit_bias={"300": 100}, seed=3)
    token = forced.choices[0].logprobs.tokens[0]
    assert forced.choices[0].logprobs.tokens == [token] * 6
    assert min(forced.choices[0].logprobs.token_logprobs) < -1, "logprobs are the model's, without the bias"
    banned = await client.completions.create(**args, temperature=0, logit_bias={"300": -100})
    assert token not in banned.choices[0].logprobs.tokens
    assert free.logprobs.tokens != forced.choices[0].logprobs.tokens


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"n": 0}, "n"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": {"five": 1}}, "logit_bias.five.[key]"),
        ({"logit_bias": {"2048": 1}}, "logit_bias"),
    ],
)
async def test_bad_parameters_are_named(client: AsyncOpenAI, change: dict, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**{"model": MODEL, "messages": say("x")} | change)
    assert caught.value.param == param
    assert caught.value.body["message"] and "Value error" not in caught.value.body["message"]


async def test_unsupported_parameters_are_refused(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
        await client.completions.create(model=MODEL, prompt="x", suffix="x")


async def test_null_means_unset(cluster: Harness) -> None:
    unset = ("temperature", "top_p", "n", "stop", "max_tokens", "logprobs", "presence_penalty", "echo", "seed", "user")
    async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as http:
        body = {"model": MODEL, "prompt": "Return the"} | dict.fromkeys(unset)
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] <= 16
        body = {"model": MODEL, "input": "hi", "max_output_tokens": 2, "store": None, "metadata": None, "tools": None}
        assert (await http.post("/v1/responses", json=body)).status_code == 200


async def test_prompt_over_the_context_length_leaves_the_session_intact(client: AsyncOpenAI) -> None:
    first = await client.completions.create(
        model=MODEL, prompt="Return the", max_tokens=4, temperature=0, extra_headers=in_session("s")
    )
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=MODEL, prompt=[5] * 5000, extra_headers=in_session("s"))
    assert caught.value.code == "context_length_exceeded"
    again = await client.completions.create(
        model=MODEL, prompt="Return the" + first.choices[0].text + " x", max_tokens=4, extra_headers=in_session("s")
    )
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 1


async def test_client_that_leaves_ends_its_turn(client: AsyncOpenAI, cluster: Harness) -> None:
    args = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}, "extra_headers": in_session("s")}
    first = await client.completions.create(prompt="Return the", max_tokens=4, **args)
    history = "Return the" + first.choices[0].text
    stream = await client.completions.create(prompt=history + " new", max_tokens=3000, stream=True, **args)
    async for _ in stream:
        break
    await stream.close()
    worker = cluster.workers[cluster.pinned_to("s")]
    await until(lambda: not worker._leader.scheduler.turns, 5, "the abandoned turn to end")
    # The session is at its last good turn, and free at once.
    again = await client.completions.create(prompt=history + " other", max_tokens=4, **args)
    assert again.usage.prompt_tokens_details.cached_tokens in (first.usage.total_tokens, first.usage.total_tokens - 1)


async def test_client_that_leaves_without_streaming_ends_its_turn(cluster: Harness) -> None:
    async with httpx.AsyncClient() as http:
        body = {"prompt": "Return the", "max_tokens": 3000, "ignore_eos": True}
        task = asyncio.create_task(http.post(f"{cluster.url}/v1/completions", json=body, timeout=60))
        await until(lambda: any(w._leader.scheduler.running for w in cluster.workers.values()), 10, "the turn to run")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: not any(w._leader.scheduler.turns for w in cluster.workers.values()), 5, "the turn to end")


async def test_turns_of_one_session_queue(client: AsyncOpenAI) -> None:
    async def ask(i: int):
        return await client.completions.create(
            model=MODEL, prompt=f"Return {i}", max_tokens=8, extra_headers=in_session("s")
        )

    answers = await asyncio.gather(*(ask(i) for i in range(4)))
    assert all(answer.choices[0].finish_reason for answer in answers)


async def test_prompt_cache_key_steers_placement_only(client: AsyncOpenAI, cluster: Harness) -> None:
    async def ask(key: str, prompt: str):
        return await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=20, extra_body={"prompt_cache_key": key, "ignore_eos": True}
        )

    await ask("k", "Return the")
    before = {name: w._leader.counters["turns"] for name, w in cluster.workers.items()}
    await asyncio.gather(*(ask("k", f"Return {i}") for i in range(4)))
    after = {name: w._leader.counters["turns"] - before[name] for name, w in cluster.workers.items()}
    assert sorted(after.values()) == [0, 4]


async def test_turns_that_come_together_are_spread(client: AsyncOpenAI, cluster: Harness) -> None:
    """A turn counts as load from the moment it is placed, not when its worker hears of it."""
    args = {"model": MODEL, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    names = [f"s{i}" for i in range(4)]
    await asyncio.gather(
        *(client.completions.create(prompt=f"{n} says", extra_headers=in_session(n), **args) for n in names)
    )
    assert sorted(w._leader.counters["turns"] for w in cluster.workers.values()) == [2, 2]


async def test_answers_are_not_delayed_by_nagle(cluster: Harness) -> None:
    """A delayed small segment costs 40 ms an answer; asyncio prevents it on sockets known as TCP only."""
    server = cluster.router._http.servers[0]
    assert all(sock.proto == socket.IPPROTO_TCP for sock in server.sockets)


async def test_metrics_and_health(cluster: Harness, client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="Return", max_tokens=3)
    await until(lambda: all(link.stats.worker_id for link in cluster.router.core.fleet.alive()), 5, "beats")
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        assert (await http.get("/health")).status_code == 200
        text = (await http.get("/metrics")).text
    assert 'holdfast_worker_pages{group="full",state="free",worker="w0"}' in text
    assert "holdfast_time_to_first_token_seconds_count 1.0" in text
    assert f"holdfast_output_tokens_total {answer.usage.completion_tokens}.0" in text
    assert "holdfast_workers_alive 2.0" in text
