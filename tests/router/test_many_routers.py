"""Several routers over one journal: a session's turns may go to any of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import httpx
import pytest

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router.journal.interface import SessionRecord
from router.turns import sessions
from tests.harness import Harness
from tests.waiting import until

Stub = session_pb2_grpc.SessionServiceStub


@pytest.fixture
def cluster(two_routers: Harness) -> Harness:
    return two_routers


@pytest.fixture
async def stubs(cluster: Harness) -> AsyncIterator[list[Stub]]:
    async with AsyncExitStack() as stack:
        yield [Stub(await stack.enter_async_context(cluster.channel(i))) for i in range(2)]


async def turn(stub: Stub, session: str, text: str, max_tokens: int = 6) -> tuple[list[int], pb.GenerateResponse]:
    sampling = pb.Sampling(max_tokens=max_tokens, ignore_eos=True)
    tokens: list[int] = []
    async for answer in stub.Generate(pb.GenerateRequest(session_id=session, text=text, sampling=sampling)):
        tokens += answer.tokens
    return tokens, answer


async def test_turns_alternate_between_routers_and_cost_their_new_tokens(cluster: Harness, stubs: list[Stub]) -> None:
    name, alone = f"alternating-{id(cluster)}", f"alone-{id(cluster)}"
    before = 0
    for i in range(6):
        ours, answer = await turn(stubs[i % 2], name, f" item {i}")
        expected, _ = await turn(stubs[0], alone, f" item {i}")
        assert ours == expected, "as if one router had them all"
        assert answer.cached_tokens in ({0} if i == 0 else {before, before - 1}), "the pin is one truth"
        before = answer.prompt_tokens + answer.completion_tokens
    await cluster.assert_no_leak()


async def test_two_turns_race_through_two_routers(cluster: Harness, stubs: list[Stub]) -> None:
    name = f"race-{id(cluster)}"
    await turn(stubs[0], name, "Return")
    (one, first), (two, second) = await asyncio.gather(
        turn(stubs[0], name, " the list", 30), turn(stubs[1], name, " the dict", 30)
    )
    assert len(one) == len(two) == 30
    session = await stubs[0].Get(pb.GetRequest(session_id=name))
    # One after another: the later one's prompt holds all of the earlier one.
    assert session.num_tokens == max(first.prompt_tokens, second.prompt_tokens) + 30
    assert abs(first.prompt_tokens - second.prompt_tokens) >= 30


async def test_a_session_that_another_router_takes_meanwhile_is_taken_again(
    cluster: Harness, stubs: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"between-{id(cluster)}"
    for stub in stubs:
        await turn(stub, name, "Return")
    ours, other = (router.core.journal for router in cluster.routers)
    take, races = ours.take, [1, 2, 3]

    async def take_and_lose(session_id: str, tenant: str, **how: bool) -> SessionRecord:
        record = await take(session_id, tenant, **how)
        if races:
            races.pop()
            await other.take(session_id, tenant, create=False)
        return record

    monkeypatch.setattr(ours, "take", take_and_lose)
    tokens, _ = await turn(stubs[0], name, " the list")
    assert len(tokens) == 6 and not races


async def test_a_session_that_others_take_again_and_again_is_busy(
    cluster: Harness, stubs: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"contended-{id(cluster)}"
    for stub in stubs:
        await turn(stub, name, "Return")
    ours, other = (router.core.journal for router in cluster.routers)
    begin_turn = ours.begin_turn

    async def lose_and_begin(session_id: str, *how: Any) -> None:
        await other.take(session_id, "", create=False)
        await begin_turn(session_id, *how)

    monkeypatch.setattr(ours, "begin_turn", lose_and_begin)
    monkeypatch.setattr(cluster.router.core.sessions, "_busy_wait_s", 0.5)
    with pytest.raises(grpc.aio.AioRpcError) as busy:
        await turn(stubs[0], name, " the list")
    assert busy.value.code() is grpc.StatusCode.ABORTED and "keep taking over" in busy.value.details()


async def test_a_race_that_may_not_queue_is_refused(
    cluster: Harness, stubs: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "ENDING_S", 0.0)
    params = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60)) for url in cluster.urls]
        name = (await clients[0].post("/open_session", json={"streaming": True})).json()
        body = {"text": "Return", "sampling_params": params, "session_params": {"id": name, "rid": None}}
        running_turn = asyncio.create_task(clients[0].post("/generate", json=body))
        await until(lambda: cluster.router.core.sessions.running_turn(name), 5, "the first to run")
        refused = await clients[1].post("/generate", json=body)
        assert refused.status_code == 400 and "already has an active request" in refused.text
        assert (await running_turn).status_code == 200


async def test_release_and_cut_and_fork_at_the_other_router(cluster: Harness, stubs: list[Stub]) -> None:
    name = f"control-{id(cluster)}"
    tokens, _ = await turn(stubs[0], name, "Return the list")
    await stubs[1].Fork(pb.ForkRequest(session_id=name, child_id=f"{name}-fork"))
    cut = await stubs[1].FreeTail(pb.FreeTailRequest(session_id=name, keep_len=0))
    assert cut.session_id == name
    assert (await turn(stubs[0], name, "Return the list"))[0] == tokens, "the first router saw the cut"
    _, forked = await turn(stubs[0], f"{name}-fork", " and")
    assert forked.cached_tokens >= 8
    stream = asyncio.create_task(turn(stubs[0], name, " more", 300))
    await until(lambda: cluster.router.core.sessions.running_turn(name), 5, "a turn to run")
    await stubs[1].Release(pb.ReleaseRequest(session_id=name))
    assert (await stream)[1].finish_reason == "abort"
    for stub in stubs:
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await turn(stub, name, "again")
        assert gone.value.code() is grpc.StatusCode.NOT_FOUND
    await cluster.assert_no_leak()


async def test_outdated_knowledge_of_a_session_is_refreshed(cluster: Harness, stubs: list[Stub]) -> None:
    name = f"grown-{id(cluster)}"
    await turn(stubs[0], name, "Return")
    await turn(stubs[1], name, " the list of all items", 20)
    sampling = pb.Sampling(max_tokens=2, ignore_eos=True)
    # Both are past the end of what the first router knows.
    request = pb.GenerateRequest(session_id=name, text=" x", sampling=sampling, rewind_to=20)
    assert [answer async for answer in stubs[0].Generate(request)][-1].prompt_tokens > 20
    await turn(stubs[1], name, " and more of them", 20)
    cut = await stubs[0].FreeTail(pb.FreeTailRequest(session_id=name, keep_len=30))
    assert cut.num_tokens == 30
    with pytest.raises(grpc.aio.AioRpcError) as past_the_end:
        await stubs[1].FreeTail(pb.FreeTailRequest(session_id=name, keep_len=31))
    assert past_the_end.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def begin_and_lose(cluster: Harness, stub: Stub, session: str, turn_id: str, sampling: pb.Sampling) -> list[int]:
    """Begin a turn at the first router, and lose that router in its middle: what the client has seen."""
    request = pb.GenerateRequest(session_id=session, text=" more", sampling=sampling, request_id=turn_id)
    stream = stub.Generate(request)
    messages = aiter(stream)
    seen: list[int] = []
    while len(seen) < 10:
        seen += (await anext(messages)).tokens
    cluster.lose_router()
    stream.cancel()
    return seen


async def go_on(stub: Stub, session: str, turn_id: str, start: int) -> tuple[list[int], str, pb.GenerateResponse]:
    """Resume until the dead router's lease has lapsed."""
    request = pb.GenerateRequest(session_id=session, request_id=turn_id, resume_from=start)
    for _ in range(400):
        tokens: list[int] = []
        text = ""
        try:
            async for answer in stub.Generate(request):
                assert answer.index == start + len(tokens)
                tokens += answer.tokens
                text += answer.text
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.ABORTED, error.details()
            await asyncio.sleep(0.02)
        else:
            return tokens, text, answer
    raise AssertionError("the lease does not lapse")


async def test_a_turn_of_a_dead_router_resumes_at_another(cluster: Harness, stubs: list[Stub]) -> None:
    name, calm = f"cut-{id(cluster)}", f"calm-{id(cluster)}"
    sampling = pb.Sampling(max_tokens=80, ignore_eos=True, temperature=0.9, seed=11)
    for session in (name, calm):
        await turn(stubs[0], session, "Return the list")
    request = pb.GenerateRequest(session_id=calm, text=" more", sampling=sampling)
    expected, text = [], ""
    async for answer in stubs[0].Generate(request):
        expected += answer.tokens
        text += answer.text
    turn_id = f"turn-{name}"
    seen = await begin_and_lose(cluster, stubs[0], name, turn_id, sampling)
    # The client has seen fewer than the journal has: none is lost, none twice.
    rest, rest_text, last = await go_on(stubs[1], name, turn_id, 7)
    assert seen[:7] + rest == expected, "the tokens of an undisturbed run"
    assert text.endswith(rest_text) and last.finish_reason == "length"
    # Asked again, after it ended: the rest of it once more.
    again, again_text, last = await go_on(stubs[1], name, turn_id, 70)
    assert again == expected[70:] and rest_text.endswith(again_text) and last.finish_reason == "length"
    # The session continues as if nothing had happened.
    assert (await turn(stubs[1], name, " and"))[0] == (await turn(stubs[1], calm, " and"))[0]
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await stubs[1].Generate(pb.GenerateRequest(session_id=name, request_id=turn_id, resume_from=0)).read()
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_sse_stream_resumes_by_its_last_event_id(cluster: Harness, stubs: list[Stub]) -> None:
    name = f"sse-{id(cluster)}"
    body = {"model": "holdfast-tiny", "prompt": "Return", "max_tokens": 60, "stream": True}
    body |= {"ignore_eos": True, "seed": 5}

    async def read(
        url: str, headers: dict[str, str], enough: int = 1000, stopped: asyncio.Event | None = None
    ) -> tuple[str, str]:
        last, text = "", ""
        async with (
            httpx.AsyncClient(base_url=url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body, headers=headers) as answer,
        ):
            if answer.status_code == 409:
                return "", ""
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    last = line.removeprefix("id: ")
                elif line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    enough -= 1
                    if not enough and stopped is not None:
                        # Still connected: the router is to be lost under this stream.
                        stopped.set()
                        await asyncio.sleep(0)
                        break
        return last, text

    _, expected = await read(cluster.urls[1], {"X-Session-ID": f"{name}-calm"})
    stop_first = asyncio.Event()
    first_part = asyncio.create_task(read(cluster.urls[0], {"X-Session-ID": name}, 12, stop_first))
    await asyncio.wait_for(stop_first.wait(), 20)
    cluster.lose_router()
    last, first = await first_part
    assert last.endswith(":12")
    rest = ""
    for _ in range(400):
        _, rest = await read(cluster.urls[1], {"X-Session-ID": name, "Last-Event-ID": last})
        if rest:
            break
        await asyncio.sleep(0.02)
    assert first + rest == expected
    async with httpx.AsyncClient(base_url=cluster.urls[1]) as http:
        headers = {"X-Session-ID": name, "Last-Event-ID": "nonsense"}
        refused = await http.post("/v1/completions", json=body, headers=headers)
        assert refused.status_code == 400 and "Last-Event-ID" in refused.text


async def test_a_router_that_dies_leaves_its_sessions_to_the_others(cluster: Harness, stubs: list[Stub]) -> None:
    name = f"left-{id(cluster)}"
    await turn(stubs[0], name, "Return the list")
    stream = asyncio.create_task(turn(stubs[0], name, " more", 3000))
    await until(lambda: cluster.router.core.sessions.running_turn(name), 5, "a turn to run")
    cluster.lose_router()
    tokens, answer = await turn(stubs[1], name, " again")
    assert len(tokens) == 6 and answer.prompt_tokens < 40, "from its last good turn on"
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    await cluster.assert_no_leak()
