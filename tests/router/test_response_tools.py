"""Tools and reasoning in ``/v1/responses``, with the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.harness import ENGINE, Harness, running
from tests.router.templates import HERMES, THINKING, with_template
from tests.router.test_tools import MODEL, NOW, WEATHER
from tests.schemas import check

TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "Tells it", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "now", "parameters": NOW, "strict": False},
]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "input": "What is the weather in Oslo?",
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 600,
    "extra_body": {"seed": 1},
}


@pytest.fixture
async def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    template = getattr(request, "param", HERMES)
    engine = replace(ENGINE, model=with_template(tmp_path / "model", template))
    async with running(tmp_path, engine=engine, num_routers=2) as harness:
        yield harness
        await harness.assert_no_leak()


@pytest.fixture
async def client(cluster: Harness) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def test_a_call_and_a_response_to_its_result(client: AsyncOpenAI) -> None:
    previous, given = openai.omit, ASKED["input"]
    for turn in range(3):
        response = await client.responses.create(**ASKED | {"input": given, "previous_response_id": previous})
        (call,) = response.output
        assert call.type == "function_call" and call.status == "completed"
        check(call.arguments, WEATHER if call.name == "weather" else NOW)
        if turn:
            assert response.usage.input_tokens_details.cached_tokens > 100
        previous = response.id
        given = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"}]
    stored = await client.responses.retrieve(previous)
    assert stored.output == response.output and stored.tools == response.tools


async def test_the_whole_history_may_be_sent_instead(client: AsyncOpenAI) -> None:
    first = await client.responses.create(**ASKED)
    (call,) = first.output
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "sun"}],
    }
    items = [{"role": "user", "content": ASKED["input"]}, call.model_dump(exclude_none=True), result]
    sent = await client.responses.create(**ASKED | {"input": items})
    followed = await client.responses.create(**ASKED | {"input": [result], "previous_response_id": first.id})
    assert sent.output[0].arguments == followed.output[0].arguments
    assert sent.usage.input_tokens == followed.usage.input_tokens


async def test_events_of_a_call(cluster: Harness, client: AsyncOpenAI) -> None:
    whole = await client.responses.create(**ASKED)
    kinds, arguments = [], ""
    async with client.responses.stream(**ASKED) as events:
        async for event in events:
            kinds.append(event.type)
            if event.type == "response.function_call_arguments.delta":
                arguments += event.delta
        final = await events.get_final_response()
    assert arguments == whole.output[0].arguments == final.output[0].arguments
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-3:] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    other = AsyncOpenAI(base_url=f"{cluster.urls[1]}/v1", api_key="none")
    again = [event async for event in await other.responses.retrieve(final.id, stream=True, starting_after=5)]
    assert [event.type for event in again] == kinds[6:], "another router numbers the same events alike"
    await other.close()


@pytest.mark.parametrize("cluster", [THINKING], indirect=True)
async def test_reasoning_is_an_item_of_its_own(client: AsyncOpenAI) -> None:
    asked = ASKED | {"tools": openai.omit, "tool_choice": openai.omit, "max_output_tokens": 40}
    asked["extra_body"] = {"seed": 3, "chat_template_kwargs": {"enable_thinking": False}}
    response = await client.responses.create(**asked)
    assert [item.type for item in response.output] == ["message"]
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": WEATHER}}
    seen = set()
    for seed in range(6):
        response = await client.responses.create(
            **asked | {"text": text, "max_output_tokens": 1500, "extra_body": {"seed": seed, "temperature": 1.3}}
        )
        kinds = tuple(item.type for item in response.output)
        seen.add(kinds)
        if "reasoning" in kinds:
            assert response.usage.output_tokens_details.reasoning_tokens > 0
        if response.status == "completed":
            check(response.output_text, WEATHER)
    assert seen <= {("message",), ("reasoning",), ("reasoning", "message")}


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "tool_choice"),
    ],
)
async def test_refusals(client: AsyncOpenAI, extra: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**ASKED | {"extra_body": extra})
    assert isinstance(refused.value.body, dict) and refused.value.body["param"].startswith(param), refused.value.body
