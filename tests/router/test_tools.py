"""Tools and reasoning with the official client, on the bundled model with other families' templates."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.harness import ENGINE, Harness, running
from tests.router.templates import HERMES, THINKING, with_template
from tests.schemas import check

MODEL = "holdfast-tiny"
SAY: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 4}}, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "parameters": NOW}},
]


@pytest.fixture
async def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    template = getattr(request, "param", HERMES)
    engine = replace(ENGINE, model=with_template(tmp_path / "model", template))
    async with running(tmp_path, engine=engine) as harness:
        yield harness
        await harness.assert_no_leak()


@pytest.fixture
async def client(cluster: Harness) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def chat(client: AsyncOpenAI, **more: Any) -> Any:
    asked = {"model": MODEL, "messages": SAY, "max_tokens": 600, "seed": 1, "tools": TOOLS} | more
    return await client.chat.completions.create(**asked)


def check_calls(calls: Any) -> None:
    assert calls
    for call in calls:
        assert call.type == "function" and call.id.startswith("call_")
        check(call.function.arguments, WEATHER if call.function.name == "weather" else NOW)
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("seed", range(3))
async def test_required_calls(client: AsyncOpenAI, seed: int) -> None:
    answer = (await chat(client, tool_choice="required", seed=seed, parallel_tool_calls=False)).choices[0]
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    assert len(answer.message.tool_calls) == 1
    check_calls(answer.message.tool_calls)


async def test_a_named_call_and_a_turn_with_its_result(client: AsyncOpenAI) -> None:
    messages: Any = list(SAY)
    session = {"X-Session-ID": "s"}
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    for turn in range(3):
        first = await chat(client, messages=messages, tool_choice=choice, extra_headers=session, seed=turn)
        check_calls(first.choices[0].message.tool_calls)
        assert [call.function.name for call in first.choices[0].message.tool_calls] == ["weather"]
        if turn:
            assert first.usage.prompt_tokens_details.cached_tokens > 100
        call = first.choices[0].message.tool_calls[0]
        messages.append(first.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"sun": true}'})
        messages.append({"role": "user", "content": "And now?"})


async def test_streamed_calls_are_those_of_the_whole_answer(client: AsyncOpenAI) -> None:
    answer = (await chat(client, tool_choice="required")).choices[0]
    whole = answer.message.tool_calls
    names, arguments, finish, pieces = {}, {}, None, 0
    async for chunk in await chat(client, tool_choice="required", stream=True):
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            pieces += 1
            if call.function.name:
                names[call.index] = call.function.name
                assert call.id and call.type == "function"
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    assert finish == answer.finish_reason and pieces > 2 * len(whole)
    assert [(names[i], arguments[i]) for i in sorted(names)] == [(c.function.name, c.function.arguments) for c in whole]


async def test_the_stream_helper_of_the_official_client(client: AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(_Weather, name="weather")
    async with client.chat.completions.stream(
        model=MODEL, messages=SAY, tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=3
    ) as stream:
        final = await stream.get_final_completion()
    call = (final.choices[0].message.tool_calls or [])[0]
    assert isinstance(call.function.parsed_arguments, _Weather)


class _Weather(openai.BaseModel):
    city: str
    days: int


async def test_strict_constrains_calls_that_the_model_chooses(client: AsyncOpenAI) -> None:
    """The assistant's message is begun with a call; the rest of it can only be of the schema."""
    strict: Any = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    answer = await chat(client, tools=strict, logit_bias={}, temperature=1.5, max_tokens=60)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    for call in answer.choices[0].message.tool_calls or []:
        assert call.function.name == "weather"


async def test_none_calls_nothing(client: AsyncOpenAI) -> None:
    answer = await chat(client, tool_choice="none", max_tokens=20)
    plain = await chat(client, tools=openai.omit, max_tokens=20)
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


async def test_several_choices_call_each_for_itself(client: AsyncOpenAI) -> None:
    answer = await chat(client, tool_choice="required", n=2)
    for choice in answer.choices:
        check_calls(choice.message.tool_calls)
    assert answer.choices[0].message.tool_calls[0].id != answer.choices[1].message.tool_calls[0].id


async def test_functions_of_the_first_api(client: AsyncOpenAI) -> None:
    functions: Any = [TOOLS[0]["function"]]
    answer = await chat(client, tools=openai.omit, functions=functions, function_call={"name": "weather"})
    choice = answer.choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    check(choice.message.function_call.arguments, WEATHER)
    messages: Any = [
        *SAY,
        choice.message.model_dump(exclude_none=True),
        {"role": "function", "name": "weather", "content": "sun"},
    ]
    assert (await chat(client, messages=messages, tools=openai.omit, functions=functions, max_tokens=5)).choices


@pytest.mark.parametrize("cluster", [THINKING], indirect=True)
async def test_reasoning_comes_apart(client: AsyncOpenAI) -> None:
    regex = {"guided_regex": r"yes|no"}
    kept: Any = {"tools": openai.omit, "max_tokens": 2000, "temperature": 2.0}
    answer = await chat(client, extra_body=regex | {"enable_thinking": False}, **kept)
    assert answer.choices[0].message.content in ("yes", "no")
    tag = {
        "type": "tag",
        "begin": "<think>",
        "content": {"type": "regex", "pattern": "[a-z ]{20,30}"},
        "end": "</think>",
    }
    form = {"type": "sequence", "elements": [tag, {"type": "regex", "pattern": "\\n\\nyes|no"}]}
    tagged = {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": form}}}
    answer = await chat(client, extra_body=tagged, **kept)
    message = answer.choices[0].message
    assert message.content in ("yes", "no") and 20 <= len(message.reasoning_content) <= 30
    assert answer.usage.completion_tokens_details.reasoning_tokens > 3
    together = await chat(client, extra_body=tagged | {"separate_reasoning": False}, **kept)
    assert together.choices[0].message.content.startswith("<think>")
    reasoning, content = "", ""
    async for chunk in await chat(client, extra_body=tagged, stream=True, **kept):
        reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        content += chunk.choices[0].delta.content or ""
    assert (reasoning, content) == (message.reasoning_content, message.content)


@pytest.mark.parametrize("cluster", [THINKING], indirect=True)
async def test_required_calls_may_follow_reasoning(client: AsyncOpenAI) -> None:
    answer = await chat(client, tool_choice="required", max_tokens=1500)
    if answer.choices[0].finish_reason == "tool_calls":
        check_calls(answer.choices[0].message.tool_calls)
    assert answer.choices[0].finish_reason in ("tool_calls", "length")


async def test_a_call_continues_over_a_lost_worker(cluster: Harness, client: AsyncOpenAI) -> None:
    whole = (await chat(client, tool_choice="required")).choices[0].message.tool_calls
    arguments, num_chunks = "", 0
    stream = await chat(client, tool_choice="required", stream=True, extra_headers={"X-Session-ID": "storm"})
    async for chunk in stream:
        num_chunks += 1
        if num_chunks == 5:
            await cluster.lose_worker(cluster.pinned_to("storm"))
        arguments += "".join(call.function.arguments for call in chunk.choices[0].delta.tool_calls or [])
    assert arguments == "".join(call.function.arguments for call in whole)


async def test_a_resumed_stream_continues_inside_a_call(cluster: Harness) -> None:
    body = {"model": MODEL, "messages": SAY, "tools": TOOLS, "tool_choice": "required", "seed": 1, "stream": True}
    body["max_tokens"] = 600
    headers = {"X-Session-ID": "s"}

    def calls_of(lines: list[str]) -> list[Any]:
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        return [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]

    async with httpx.AsyncClient(base_url=f"{cluster.url}/v1", timeout=60) as http:
        whole = (await http.post("/chat/completions", json=body, headers=headers)).text.splitlines()
        ids = [line[4:] for line in whole if line.startswith("id: ")]
        at = len(ids) // 2
        turn = {"Last-Event-ID": ids[at]}
        rest = (await http.post("/chat/completions", json=body, headers=headers | turn)).text.splitlines()
    before = whole[: whole.index(f"id: {ids[at]}") + 2]
    joined, expected = calls_of(before) + calls_of(rest), calls_of(whole)
    text = ["".join(c["function"].get("arguments", "") for c in calls) for calls in (joined, expected)]
    assert text[0] == text[1]
    assert [c["id"] for c in joined if "id" in c] == [c["id"] for c in expected if "id" in c]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": "weather"}, "tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        (
            {"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"type": "x"}}}]},
            "tools",
        ),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages"),
    ],
)
async def test_refusals(client: AsyncOpenAI, extra: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(client, extra_body=extra)
    assert isinstance(refused.value.body, dict) and refused.value.body["param"].startswith(param), refused.value.body


async def test_a_model_whose_template_shows_no_format(tmp_path: Path) -> None:
    async with running(tmp_path) as plain, AsyncOpenAI(base_url=f"{plain.url}/v1", api_key="none") as client:
        answer = await chat(client, tool_choice="required", parallel_tool_calls=False)
        check_calls(answer.choices[0].message.tool_calls)
        assert (await chat(client, max_tokens=5)).choices[0].message.content


async def test_a_model_that_writes_no_calls(tmp_path: Path) -> None:
    async with (
        running(tmp_path, tool_call_parser="none") as plain,
        AsyncOpenAI(base_url=f"{plain.url}/v1", api_key="none") as client,
    ):
        with pytest.raises(openai.BadRequestError, match="writes no calls"):
            await chat(client, tool_choice="required")
