"""OpenAI's responses and conversations with the official client, over two routers and one journal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from router.access.keys import given_key
from router.faces.openai.response_turns import ResponseTurns
from router.turns.live import LiveTurns
from tests.harness import Harness, running
from tests.waiting import until

MODEL = "holdfast-tiny"
ON = {"seed": 3, "ignore_eos": True}
LONG = "Explain what sys.path is for, with all details."


@pytest.fixture
def cluster(two_routers: Harness) -> Harness:
    return two_routers


@pytest.fixture
async def clients(cluster: Harness) -> AsyncIterator[list[AsyncOpenAI]]:
    made = [AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in cluster.urls]
    yield made
    for client in made:
        await client.close()


async def ask(client: AsyncOpenAI, text: Any, **more: Any) -> Any:
    given = {"model": MODEL, "max_output_tokens": 20, "temperature": 0.8, "extra_body": {"seed": 3}} | more
    return await client.responses.create(input=text, **given)


async def said_alone(client: AsyncOpenAI, *texts: str) -> str:
    """What the model says after these, without any session."""
    roles = ("user", "assistant")
    messages: Any = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    answer = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=20, temperature=0.8, seed=3
    )
    return answer.choices[0].message.content or ""


async def test_instructions_are_said_first_and_hold_for_their_response_alone(clients: list[AsyncOpenAI]) -> None:
    async def said(*messages: dict[str, str]) -> str:
        answer = await clients[0].chat.completions.create(
            model=MODEL, messages=list(messages), max_tokens=20, temperature=0.8, seed=3
        )
        return answer.choices[0].message.content or ""

    system = {"role": "system", "content": "Answer in one word."}
    asked = {"role": "user", "content": "What does list.sort do?"}
    one = await ask(clients[0], asked["content"], instructions=system["content"])
    assert one.instructions == system["content"]
    assert one.output_text == await said(system, asked)
    two = await ask(clients[1], "And list.reverse?", previous_response_id=one.id)
    answered = {"role": "assistant", "content": one.output_text}
    assert two.output_text == await said(asked, answered, {"role": "user", "content": "And list.reverse?"})


async def test_a_chain_costs_its_new_tokens_and_a_branch_shares_them(clients: list[AsyncOpenAI]) -> None:
    one = await ask(clients[0], "What does list.sort do?")
    assert one.output_text == await said_alone(clients[0], "What does list.sort do?")
    two = await ask(clients[1], "And list.reverse?", previous_response_id=one.id)
    texts = ("What does list.sort do?", one.output_text, "And list.reverse?")
    assert two.output_text == await said_alone(clients[0], *texts)
    cached = two.usage.input_tokens_details.cached_tokens
    assert one.usage.total_tokens - cached in (0, 1), "only what is new is computed"
    branch = await ask(clients[0], "And dict.get?", previous_response_id=one.id)
    assert branch.output_text == await said_alone(clients[0], *texts[:2], "And dict.get?")
    assert branch.usage.input_tokens_details.cached_tokens >= one.usage.total_tokens - 16
    on = await ask(clients[1], "Why?", previous_response_id=two.id)
    assert on.output_text == await said_alone(clients[0], *texts, two.output_text, "Why?"), "the branch changed nothing"
    assert two.usage.total_tokens - on.usage.input_tokens_details.cached_tokens in (0, 1)


async def test_two_concurrent_requests_both_continue_one_response(clients: list[AsyncOpenAI]) -> None:
    one = await ask(clients[0], "What does list.sort do?")
    both = await asyncio.gather(
        *(ask(clients[i], f"And number {i}?", previous_response_id=one.id, max_output_tokens=8) for i in range(2))
    )
    for i, response in enumerate(both):
        texts = ("What does list.sort do?", one.output_text, f"And number {i}?")
        assert (await said_alone(clients[0], *texts)).startswith(response.output_text)


async def test_a_stream_resumes_from_any_event(clients: list[AsyncOpenAI]) -> None:
    events = [e async for e in await ask(clients[0], "What is a tuple?", stream=True)]
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    whole = events[-1].response
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    for after in (0, 3, *numbers[5:-4:4], numbers[-2]):
        stream = await clients[1].responses.retrieve(whole.id, stream=True, starting_after=after)
        rest = [event async for event in stream]
        assert min(e.sequence_number for e in rest) > after
        shown = "".join(e.delta for e in events if e.type.endswith("text.delta") and e.sequence_number <= after)
        assert shown + "".join(e.delta for e in rest if e.type.endswith("text.delta")) == whole.output_text
        assert rest[-1].response.output_text == whole.output_text


async def test_a_stream_cut_by_a_dead_router_resumes_at_another(cluster: Harness, clients: list[AsyncOpenAI]) -> None:
    whole = (await ask(clients[1], LONG, max_output_tokens=300, extra_body=ON)).output_text
    seen, last, response_id = "", -1, ""
    stream = await ask(clients[0], LONG, max_output_tokens=300, extra_body=ON, stream=True)
    async for event in stream:
        last = event.sequence_number
        if event.type == "response.created":
            response_id = event.response.id
        if event.type == "response.output_text.delta":
            seen += event.delta
        if len(seen) > 60:
            break
    cluster.lose_router()
    await stream.close()
    assert len(seen) < len(whole)
    async for event in await clients[1].responses.retrieve(response_id, stream=True, starting_after=last):
        assert event.sequence_number > last
        last = event.sequence_number
        if event.type == "response.output_text.delta":
            seen += event.delta
    assert seen == whole
    assert (await clients[1].responses.retrieve(response_id)).output_text == whole


async def test_a_background_response_outlives_its_router(cluster: Harness, clients: list[AsyncOpenAI]) -> None:
    whole = (await ask(clients[1], LONG, max_output_tokens=300, extra_body=ON)).output_text
    response = await ask(clients[0], LONG, max_output_tokens=300, extra_body=ON, background=True)
    assert response.status == "queued"
    live = cluster.routers[0].core.live
    await until(lambda: any(turn.num_output > 10 for turn in live._turns.values()), 10, "some tokens")
    cluster.lose_router()
    while response.status in ("queued", "in_progress"):
        await asyncio.sleep(0.05)
        response = await clients[1].responses.retrieve(response.id)
    assert response.output_text == whole


async def test_background_is_polled_followed_and_cancelled_anywhere(clients: list[AsyncOpenAI]) -> None:
    made = await ask(clients[0], "What is a tuple?", background=True)
    assert made.status == "queued"
    stream = await clients[1].responses.retrieve(made.id, stream=True)
    events = [event async for event in stream]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    ended = await clients[0].responses.retrieve(made.id)
    assert ended.output_text == text and ended.status in ("completed", "incomplete")

    long = await ask(clients[0], LONG, max_output_tokens=2000, extra_body=ON, background=True)
    cancelled = await clients[1].responses.cancel(long.id)
    assert (cancelled.status, cancelled.output) == ("cancelled", [])
    assert (await clients[0].responses.cancel(long.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled and cannot be continued"):
        await ask(clients[0], "And?", previous_response_id=long.id)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await clients[0].responses.cancel((await ask(clients[0], "Hm?", max_output_tokens=2)).id)


async def test_the_input_is_counted_before_it_is_sent(clients: list[AsyncOpenAI]) -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    one = await ask(clients[0], "What is a tuple?", instructions="Be brief.", max_output_tokens=4)
    for i, more in enumerate(({}, {"previous_response_id": one.id}, {"tools": [tool]})):
        given: dict[str, Any] = {"input": f"And {i}?", "instructions": "Be kind."} | more
        counted = await clients[i % 2].responses.input_tokens.count(model=MODEL, **given)
        used = await clients[0].responses.create(model=MODEL, max_output_tokens=2, **given)
        assert used.usage is not None and counted.input_tokens == used.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="not found"):
        await clients[0].responses.input_tokens.count(model=MODEL, input="x", previous_response_id="resp_unknown")


async def test_sampling_beyond_openai_s_is_used(clients: list[AsyncOpenAI]) -> None:
    likeliest = await ask(clients[0], "Hello", temperature=0)
    assert (await ask(clients[1], "Hello", temperature=1.0)).output_text != likeliest.output_text
    first = await ask(clients[1], "Hello", temperature=1.0, extra_body={"top_k": 1})
    assert first.output_text == likeliest.output_text


async def test_a_cancel_before_the_turn_is_live_is_not_lost(
    clients: list[AsyncOpenAI], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, looked = ResponseTurns._prepare, asyncio.Event()

    async def late(*args: Any) -> Any:
        await looked.wait()
        return await prepare(*args)

    def abort(live: LiveTurns, tenant: str, turn_id: str) -> bool:
        looked.set()
        return find(live, tenant, turn_id)

    find = LiveTurns.abort
    monkeypatch.setattr(ResponseTurns, "_prepare", late)
    monkeypatch.setattr(LiveTurns, "abort", abort)
    long = await ask(clients[0], LONG, max_output_tokens=2000, extra_body=ON, background=True)
    assert (await clients[1].responses.cancel(long.id)).status == "cancelled"
    assert looked.is_set()


async def test_deleted_is_gone_and_its_session_released(cluster: Harness, clients: list[AsyncOpenAI]) -> None:
    one = await ask(clients[0], "What is a tuple?", max_output_tokens=4)
    two = await ask(clients[0], "And a list?", previous_response_id=one.id, max_output_tokens=4)
    items = await clients[1].responses.input_items.list(two.id)
    assert [item.content[0].text for item in items.data] == ["And a list?"]
    await clients[1].responses.delete(two.id)
    with pytest.raises(openai.NotFoundError):
        await clients[0].responses.retrieve(two.id)
    assert (await ask(clients[0], "And a dict?", previous_response_id=one.id, max_output_tokens=4)).output_text
    sessions = {record.session_id for record, _, _ in await cluster.router.core.journal.list_sessions("")}
    assert one.id in sessions
    await clients[0].responses.delete(one.id)
    assert one.id not in {record.session_id for record, _, _ in await cluster.router.core.journal.list_sessions("")}


async def test_not_stored_leaves_nothing(cluster: Harness, clients: list[AsyncOpenAI]) -> None:
    one = await ask(clients[0], "What is a tuple?")
    other = await ask(clients[1], "And a list?", previous_response_id=one.id, store=False)
    assert other.output_text == await said_alone(clients[0], "What is a tuple?", one.output_text, "And a list?")
    with pytest.raises(openai.NotFoundError):
        await clients[0].responses.retrieve(other.id)


async def test_a_conversation_keeps_its_items(clients: list[AsyncOpenAI]) -> None:
    made = await clients[0].conversations.create(
        items=[{"type": "message", "role": "user", "content": "What is a tuple?"}], metadata={"topic": "types"}
    )
    assert (await clients[1].conversations.retrieve(made.id)).metadata == {"topic": "types"}
    await clients[0].conversations.items.create(
        made.id, items=[{"type": "message", "role": "assistant", "content": "A sequence."}]
    )
    one = await ask(clients[0], "And a list?", conversation=made.id)
    assert one.output_text == await said_alone(clients[0], "What is a tuple?", "A sequence.", "And a list?")
    two = await ask(clients[1], "Why?", conversation=made.id)
    assert one.usage.total_tokens - two.usage.input_tokens_details.cached_tokens in (0, 1)
    listed = await clients[0].conversations.items.list(made.id, order="asc", limit=4)
    assert [item.content[0].text for item in listed.data] == [
        "What is a tuple?",
        "A sequence.",
        "And a list?",
        one.output_text,
    ]
    rest = await clients[0].conversations.items.list(made.id, order="asc", after=listed.last_id)
    assert [item.content[0].text for item in rest.data] == ["Why?", two.output_text]
    for item in rest.data:
        await clients[0].conversations.items.delete(item.id, conversation_id=made.id)
    again = await ask(clients[0], "How?", conversation=made.id)
    texts = ("What is a tuple?", "A sequence.", "And a list?", one.output_text, "How?")
    assert again.output_text == await said_alone(clients[0], *texts), "a deleted item is an edited history"
    await clients[1].conversations.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await ask(clients[0], "Still?", conversation=made.id)


@pytest.mark.parametrize("cluster", ["sqlite"], indirect=True)
async def test_a_client_that_leaves_cancels_its_response(cluster: Harness, clients: list[AsyncOpenAI]) -> None:
    stream = await ask(clients[0], LONG, max_output_tokens=2000, extra_body=ON, stream=True)
    async for event in stream:
        if event.type == "response.created":
            response_id = event.response.id
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    while (left := await clients[1].responses.retrieve(response_id)).status == "in_progress":
        await asyncio.sleep(0.05)
    assert (left.status, left.output) == ("cancelled", [])
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(clients[0], "Hm?", previous_response_id="resp_unknown")
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    journal = cluster.router.core.journal
    assert [key for key, _ in await journal.list_objects("", "response/")] == [f"response/{response_id}"]


@pytest.mark.parametrize("cluster", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"previous_response_id": "resp_unknown"}, "Previous response with id 'resp_unknown' not found"),
        ({"conversation": "conv_unknown"}, "conversation conv_unknown does not exist"),
        ({"previous_response_id": "a", "conversation": "b"}, "set only one of previous_response_id and conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"model": "gpt-5"}, "is not served here"),
        ({"background": True, "store": False}, "background can only be used when `store` is true"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "only text"),
    ],
)
async def test_bad_requests_get_clear_errors(
    cluster: Harness, clients: list[AsyncOpenAI], change: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"model": MODEL, "input": "Hello"} | change
    with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=message):
        await clients[0].responses.create(**given)


async def test_another_tenant_s_responses_are_not_found(tmp_path: Path) -> None:
    async with running(tmp_path, api_keys=(given_key("mine"), given_key("yours"))) as cluster:
        mine, yours = (
            AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=key, max_retries=0) for key in ("mine", "yours")
        )
        made = await ask(mine, "What is a tuple?", max_output_tokens=2)
        with pytest.raises(openai.NotFoundError):
            await yours.responses.retrieve(made.id)
        await mine.close()
        await yours.close()


async def test_logprobs_of_the_text_may_be_included(clients: list[AsyncOpenAI]) -> None:
    included: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events = [e async for e in await ask(clients[0], "What is a tuple?", stream=True, **included)]
    whole = events[-1].response
    part = whole.output[0].content[0]
    assert "".join(item.token for item in part.logprobs).startswith(part.text)
    assert all(len(item.top_logprobs) == 2 and bytes(item.bytes).decode() == item.token for item in part.logprobs)
    shown = [item for e in events if e.type == "response.output_text.delta" for item in e.logprobs]
    assert [(i.token, i.logprob) for i in shown] == [(i.token, i.logprob) for i in part.logprobs]
    again = [e async for e in await clients[1].responses.retrieve(whole.id, stream=True)]
    assert [e.model_dump() for e in again] == [e.model_dump() for e in events]
    plain = await ask(clients[0], "What is a tuple?")
    assert plain.output_text == whole.output_text and plain.output[0].content[0].logprobs == []


async def test_an_input_that_is_too_long_is_cut_if_the_request_says_so(clients: list[AsyncOpenAI]) -> None:
    context_len = (await clients[0].models.retrieve("holdfast-tiny")).model_dump()["max_model_len"]
    long = "What does list.sort do? " * (context_len // 30)
    items: Any = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} {long}"} for i in range(8)]
    items.append({"role": "user", "content": "And list.reverse?"})
    with pytest.raises(openai.BadRequestError, match="maximum"):
        await ask(clients[0], items)
    cut = await ask(clients[0], items, truncation="auto", instructions="Be brief.")
    assert cut.truncation == "auto" and cut.usage.input_tokens <= context_len - 24
    fits = [i for i in range(0, 9, 2) if await _is_answered(clients[0], items[i:])]
    assert 0 < fits[0] < 8
    assert cut.output_text == (await ask(clients[0], items[fits[0] :], instructions="Be brief.")).output_text
    with pytest.raises(openai.BadRequestError, match="maximum"):
        await ask(clients[0], "word " * context_len, truncation="auto")
    short = await ask(clients[0], "What is a tuple?", truncation="auto")
    assert short.output_text == (await ask(clients[0], "What is a tuple?")).output_text


async def _is_answered(client: AsyncOpenAI, items: Any) -> bool:
    try:
        return bool(await ask(client, items, instructions="Be brief."))
    except openai.BadRequestError:
        return False
