"""``/v1/messages`` with the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from router.access.keys import given_key
from tests.harness import ENGINE, Harness, running
from tests.router.templates import THINKING, with_template
from tests.schemas import check

MODEL = "holdfast-tiny"
SAY: Any = [{"role": "user", "content": "What does list.sort do?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "weather", "description": "Tells it", "input_schema": WEATHER}]
GREEDY: Any = {"temperature": 0.0}
SESSION: Any = {"X-Session-ID": "s"}
CALL: Any = {"type": "tool", "name": "weather"}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running(tmp_path, engine=replace(ENGINE, model=with_template(tmp_path / "model", THINKING))) as harness:
        yield harness
        await harness.assert_no_leak()


@pytest.fixture
async def client(cluster: Harness) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=cluster.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def say(client: AsyncAnthropic, *, temperature: float = 0.0, extra_body: Any = None, **more: Any) -> Any:
    asked: dict[str, Any] = {"model": MODEL, "messages": SAY, "max_tokens": 20} | more
    # Earlier versions of the client had the temperature as a parameter.
    return await client.messages.create(**asked, extra_body={"temperature": temperature} | (extra_body or {}))


async def test_a_message_and_its_stream(client: AsyncAnthropic) -> None:
    message = await say(client, system="Be brief.")
    assert message.type == "message" and message.role == "assistant" and message.id.startswith("msg_")
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 20
    kinds, text = [], ""
    stream = client.messages.stream(
        model=MODEL, messages=SAY, max_tokens=20, system=[{"type": "text", "text": "Be brief."}], extra_body=GREEDY
    )
    async with stream as events:
        async for event in events:
            kinds.append(event.type)
            text += event.text if event.type == "text" else ""
        final = await events.get_final_message()
    assert text == message.content[0].text == final.content[0].text
    assert final.usage.output_tokens == 20 and final.stop_reason == "max_tokens"
    assert [kinds[0], kinds[-1]] == ["message_start", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


async def test_stop_sequences(client: AsyncAnthropic) -> None:
    text = (await say(client)).content[0].text
    stop = text[8:12]
    message = await say(client, stop_sequences=[stop])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == stop
    assert message.content[0].text == text[: text.index(stop)]


async def test_tools_and_their_results_on_a_session(client: AsyncAnthropic) -> None:
    messages: Any = list(SAY)
    for turn in range(3):
        message = await say(
            client,
            messages=messages,
            tools=TOOLS,
            tool_choice=CALL,
            max_tokens=600,
            extra_headers={"X-Session-ID": "s"},
        )
        assert message.stop_reason == "tool_use"
        (use,) = [block for block in message.content if block.type == "tool_use"]
        check(json.dumps(use.input), WEATHER)
        if turn:
            assert message.usage.cache_read_input_tokens > 100
        messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sun"}]}
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "And now?"}]})


async def test_streamed_tools(client: AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"messages": SAY, "tools": TOOLS, "tool_choice": CALL, "max_tokens": 600}
    whole = await say(client, **asked)
    async with client.messages.stream(model=MODEL, extra_body=GREEDY, **asked) as events:
        final = await events.get_final_message()
    assert [b.model_dump(include={"type", "name", "input"}) for b in final.content] == [
        b.model_dump(include={"type", "name", "input"}) for b in whole.content
    ]
    assert final.stop_reason == "tool_use"


async def test_thinking_is_a_block_of_its_own(client: AsyncAnthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    form: Any = {"type": "json_schema", "schema": WEATHER}
    for seed_words in ("a", "b", "c"):
        messages: Any = [{"role": "user", "content": f"Think of {seed_words}"}]
        asked: dict[str, Any] = {"messages": messages, "max_tokens": 1500, "temperature": 1.0, "thinking": thinking}
        message = await say(client, extra_body={"output_config": {"format": form}}, **asked)
        if message.stop_reason == "end_turn":
            check(message.content[-1].text, WEATHER)
        assert [b.type for b in message.content] in (["text"], ["thinking", "text"], ["thinking"])
    plain = await say(client, extra_body={"output_config": {"format": form}}, max_tokens=600)
    assert [block.type for block in plain.content] == ["text"]
    check(plain.content[0].text, WEATHER)


async def test_the_last_message_may_begin_the_answer(client: AsyncAnthropic) -> None:
    begun = [*SAY, {"role": "assistant", "content": "It sorts the"}]
    plain, message = await say(client), await say(client, messages=begun)
    assert not message.content[0].text.startswith("It sorts")
    assert message.usage.input_tokens != plain.usage.input_tokens


async def test_count_tokens_is_what_a_message_uses(client: AsyncAnthropic) -> None:
    asked: dict[str, Any] = {"messages": SAY, "system": "Be brief.", "tools": TOOLS}
    counted = await client.messages.count_tokens(model=MODEL, **asked)
    used = (await say(client, max_tokens=1, **asked)).usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


async def test_an_edited_history_is_a_rewind(client: AsyncAnthropic) -> None:
    first = await say(client, extra_headers=SESSION)
    answered = [*SAY, {"role": "assistant", "content": first.content[0].text}]
    await say(client, messages=[*answered, {"role": "user", "content": "More?"}], extra_headers=SESSION)
    edited = [*answered, {"role": "user", "content": "Less?"}]
    rewound = await say(client, messages=edited, extra_headers=SESSION)
    assert rewound.content[0].text == (await say(client, messages=edited)).content[0].text
    assert rewound.usage.cache_read_input_tokens > 10


async def test_placement_by_user(cluster: Harness, client: AsyncAnthropic) -> None:
    for _ in range(3):
        used = (await say(client, metadata={"user_id": "me"})).usage
    assert used.cache_read_input_tokens > 0


async def test_keys_come_as_the_client_sends_them(tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=(given_key("secret"),)) as cluster:
        async with AsyncAnthropic(base_url=cluster.url, api_key="secret") as client:
            assert (await say(client)).content
        async with AsyncAnthropic(base_url=cluster.url, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await say(client)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"model": "claude"}, "is not served here"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "tool_use is not supported"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": 3}]}]}, "needs a name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "no tool 'x'"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format.schema",
        ),
    ],
)
async def test_refusals(client: AsyncAnthropic, extra: dict[str, Any], said: str) -> None:
    with pytest.raises(anthropic.APIStatusError, match=said) as refused:
        await say(client, extra_body=extra)
    assert refused.value.status_code in (400, 404)
    assert isinstance(refused.value.body, dict) and refused.value.body["type"] == "error"
