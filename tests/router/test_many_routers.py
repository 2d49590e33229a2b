"""Several routers over one journal: a session's turns may come to any of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import httpx
import pytest

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from tests.harness import Harness, running
from tests.redis_server import RedisServer, redis_server
from tests.waiting import until

Stub = session_pb2_grpc.SessionServiceStub


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
async def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    settings = {}
    if request.param == "redis":
        settings["journal_url"] = request.getfixturevalue("redis").url.removesuffix("/0") + f"/{id(tmp_path) % 16}"
    async with running(tmp_path, num_routers=2, **settings) as cluster:
        yield cluster


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


async def test_a_race_that_may_not_queue_is_refused(cluster: Harness, stubs: list[Stub]) -> None:
    params = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60)) for url in cluster.urls]
        name = (await clients[0].post("/open_session", json={})).json()
        body = {"text": "Return", "sampling_params": params, "session_params": {"id": name, "rid": None}}
        running_turn = asyncio.create_task(clients[0].post("/generate", json=body))
        await until(lambda: cluster.router.gateway.is_busy(name), 5, "the first to run")
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
    await until(lambda: cluster.router.gateway.is_busy(name), 5, "a turn to run")
    await stubs[1].Release(pb.ReleaseRequest(session_id=name))
    assert (await stream)[1].finish_reason == "abort"
    for stub in stubs:
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await turn(stub, name, "again")
        assert gone.value.code() is grpc.StatusCode.NOT_FOUND
    await cluster.assert_no_leak()


async def test_a_router_that_dies_leaves_its_sessions_to_the_others(cluster: Harness, stubs: list[Stub]) -> None:
    name = f"left-{id(cluster)}"
    await turn(stubs[0], name, "Return the list")
    stream = asyncio.create_task(turn(stubs[0], name, " more", 3000))
    await until(lambda: cluster.router.gateway.is_busy(name), 5, "a turn to run")
    # As a kill -9 looks to the others: no word any more, and its turns stay open in the journal.
    dead = cluster.routers.pop(0)
    dead._journal._beats.cancel()  # type: ignore[attr-defined]
    for link in dead.gateway._links.values():
        link._task.cancel()
    tokens, answer = await turn(stubs[1], name, " again")
    assert len(tokens) == 6 and answer.prompt_tokens < 40, "from its last good turn on"
    stream.cancel()
    await dead.stop()
    await cluster.assert_no_leak()
