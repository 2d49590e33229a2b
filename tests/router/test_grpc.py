"""``holdfast.v1.SessionService`` over a real channel."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from holdfast.errors import DeadlineExceeded
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc, worker_pb2, worker_pb2_grpc
from router.access.keys import given_key
from router.turns.sessions import Session
from router.turns.turn import TurnRequest
from tests.harness import Harness, running
from tests.waiting import until

Stub = session_pb2_grpc.SessionServiceStub


@pytest.fixture
async def stub(cluster: Harness) -> AsyncIterator[Stub]:
    async with cluster.channel() as channel:
        yield Stub(channel)


def turn(session: str, tokens: list[int], max_tokens: int = 8, **more) -> pb.GenerateRequest:
    sampling = pb.Sampling(max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(session_id=session, tokens=pb.TokenIds(ids=tokens), sampling=sampling, **more)


async def run(stub: Stub, request: pb.GenerateRequest) -> tuple[list[int], pb.GenerateResponse]:
    tokens: list[int] = []
    async for answer in stub.Generate(request):
        assert answer.index == len(tokens)
        tokens += answer.tokens
    return tokens, answer


async def test_turns_rewind_and_fork(stub: Stub) -> None:
    await stub.Open(pb.OpenRequest(session_id="s"))
    first, end = await run(stub, turn("s", [100, 101, 102]))
    assert (end.finish_reason, end.completion_tokens, end.cached_tokens) == ("length", 8, 0)
    second, end = await run(stub, turn("s", [200]))
    assert end.cached_tokens == 10 and end.prompt_tokens == 12
    # Rewind to after the first turn and say the same: the same answer, from the same KV.
    again, end = await run(stub, turn("s", [200], rewind_to=11))
    assert again == second and end.cached_tokens >= 10
    child = await stub.Fork(pb.ForkRequest(session_id="s", child_id="child", at_len=11))
    assert child.num_tokens == 11
    forked, end = await run(stub, turn("child", [200]))
    assert forked == second and end.cached_tokens >= 10
    listed = {s.session_id: s.num_tokens for s in (await stub.List(pb.ListRequest())).sessions}
    assert listed == {"s": 20, "child": 20}
    assert first


async def test_free_tail_cuts_and_the_rest_stays_cached(stub: Stub) -> None:
    await run(stub, turn("s", list(range(100, 140))))
    cut = await stub.FreeTail(pb.FreeTailRequest(session_id="s", keep_len=21))
    assert cut.num_tokens == 21
    assert (await stub.FreeTail(pb.FreeTailRequest(session_id="s", keep_len=21))).num_tokens == 21
    _, end = await run(stub, turn("s", [7]))
    assert (end.prompt_tokens, end.cached_tokens) == (22, 21)
    await refused(stub.FreeTail(pb.FreeTailRequest(session_id="s", keep_len=500)), "INVALID_ARGUMENT")


async def test_release_is_final_and_idempotent(stub: Stub, cluster: Harness) -> None:
    await run(stub, turn("s", list(range(100, 140))))
    assert (await stub.Release(pb.ReleaseRequest(session_id="s"))).pages_freed > 0
    assert (await stub.Release(pb.ReleaseRequest(session_id="s"))).pages_freed == 0
    assert all(
        w._leader.cache.groups[0].pool.num_free == w._leader.cache.groups[0].pool.num_pages
        for w in cluster.workers.values()
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await run(stub, turn("s", [1]))
    assert ("holdfast-code", "session_released") in tuple(caught.value.trailing_metadata())
    await refused(stub.Open(pb.OpenRequest(session_id="s")), "NOT_FOUND")
    await refused(stub.Release(pb.ReleaseRequest(session_id="never")), "NOT_FOUND")


async def test_release_ends_a_running_turn(stub: Stub) -> None:
    call = stub.Generate(turn("s", [100], max_tokens=3000))
    await call.read()
    await stub.Release(pb.ReleaseRequest(session_id="s"))
    assert (await rest_of(call))[-1] == "abort"


async def test_turn_that_a_tombstone_overtakes_ends_as_aborted(stub: Stub, cluster: Harness) -> None:
    """The journal knows of the release before the turn does: as when another router wrote it."""
    await run(stub, turn("s", [100]))
    call = stub.Generate(turn("s", [100], max_tokens=3000))
    await call.read()
    await cluster.router.core.journal.release("s", "")
    assert (await rest_of(call))[-1] == "abort"


async def test_release_after_turn_waits_for_it(stub: Stub) -> None:
    call = stub.Generate(turn("s", [100], max_tokens=200))
    await call.read()
    released = stub.Release(pb.ReleaseRequest(session_id="s", mode=pb.RELEASE_MODE_AFTER_TURN))
    assert (await rest_of(call))[-1] == "length"
    await released
    await refused(stub.Get(pb.GetRequest(session_id="s")), "NOT_FOUND")


async def test_cancelled_call_ends_its_turn(stub: Stub, cluster: Harness) -> None:
    await run(stub, turn("s", [100, 101]))
    call = stub.Generate(turn("s", [200], max_tokens=3000))
    await call.read()
    call.cancel()
    await until(lambda: not any(w._leader.scheduler.turns for w in cluster.workers.values()), 5, "the turn to end")
    _, end = await run(stub, turn("s", [300]))
    assert end.prompt_tokens == 11, "the session is at its last good turn"
    assert end.cached_tokens in (9, 10)


@pytest.mark.parametrize("field", [{"temperature": -1}, {"top_p": 2}, {"max_tokens": -1}, {"logprobs": 99}])
async def test_bad_sampling_is_named(stub: Stub, field: dict) -> None:
    request = pb.GenerateRequest(text="x", sampling=pb.Sampling(**field))
    with pytest.raises(grpc.aio.AioRpcError, match=next(iter(field))) as caught:
        await run(stub, request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_and_reflection(cluster: Harness) -> None:
    async with cluster.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="holdfast.v1.SessionService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflect.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert "holdfast.v1.SessionService" in names


async def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    async with (
        running(tmp_path, num_workers=1, api_keys=(given_key("one"), given_key("two"))) as cluster,
        cluster.channel() as channel,
    ):
        stub = Stub(channel)
        one, two = ((("authorization", f"Bearer {key}"),) for key in ("one", "two"))
        prompt = list(range(100, 180))
        async for _ in stub.Generate(turn("s", prompt), metadata=one):
            pass
        async for answer in stub.Generate(turn("t", prompt), metadata=two):
            assert answer.cached_tokens == 0, "no prefix is shared across tenants"
        await refused(stub.Get(pb.GetRequest(session_id="s"), metadata=two), "NOT_FOUND")
        await refused(stub.Get(pb.GetRequest(session_id="s")), "UNAUTHENTICATED")
        assert [s.session_id for s in (await stub.List(pb.ListRequest(), metadata=two)).sessions] == ["t"]


async def rest_of(call) -> list[str]:
    reasons = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        reasons.append(answer.finish_reason)
    return reasons


async def refused(call, code: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code().name == code


async def test_a_session_is_free_when_its_turn_is_seen_to_end(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1) as cluster:
        core = cluster.router.core

        async def prepare(session: Session | None) -> tuple[int, array[int]]:
            return 0, array("i", [7, 8])

        async def play(turn_id: str, session_id: str, max_tokens: int, *, abort: bool = False) -> None:
            sampling = pb.Sampling(max_tokens=max_tokens, ignore_eos=True)
            request = TurnRequest("", prepare, sampling, session_id, turn_id=turn_id)
            async for chunk in core.gateway.run(request):
                if abort:
                    core.live.abort("", turn_id)
                assert not (chunk.finish_reason and core.sessions.running_turn(session_id))

        await play("whole", "s", 4)
        await play("aborted", "s", 400, abort=True)
        core.gateway._relay._config = replace(core.config, token_timeout_s=0.0)
        with pytest.raises(DeadlineExceeded):
            await play("failed", "s", 400)
        assert not core.sessions.running_turn("s")


async def test_a_caller_that_gives_up_on_a_release_disturbs_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        sampling = pb.Sampling(max_tokens=150, ignore_eos=True)
        stream = stub.Generate(pb.GenerateRequest(session_id="s", text="Return", sampling=sampling))
        messages = aiter(stream)
        await anext(messages)
        worker = grpc.aio.insecure_channel(cluster.addresses["w0"].address)
        control = worker_pb2_grpc.WorkerServiceStub(worker)
        request = worker_pb2.WorkerReleaseRequest(
            session_id="s", epoch=1, mode=pb.RELEASE_MODE_AFTER_TURN, request_id="once"
        )
        with pytest.raises(grpc.aio.AioRpcError) as given_up:
            await control.Release(request, timeout=0.05)
        assert given_up.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        answers = await asyncio.gather(control.Release(request), control.Release(request))
        assert answers[0] == answers[1] == await control.Release(request), "asked again, answered the same"
        assert answers[0].ranks[0].pages_freed > 0
        assert [message.finish_reason async for message in messages][-1] == "length", "the turn was waited for"
        stale = worker_pb2.WorkerFreeTailRequest(session_id="s2", epoch=1, keep_len=0)
        await stub.Open(pb.OpenRequest(session_id="s2"))
        cluster.workers["w0"]._leader.epochs.remember("s2", 3)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await control.FreeTail(stale)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await worker.close()
        await cluster.assert_no_leak()


async def test_a_worker_lost_during_a_release_is_lost_with_its_pages(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        async for _ in stub.Generate(turn("s", [7, 8])):
            pass
        stuck = threading.Event()
        cluster.workers["w0"]._leader._commands.put(stuck.wait)
        release = asyncio.create_task(cluster.router.core.control.release("s", ""))
        await asyncio.wait([release], timeout=0.1)
        assert not release.done()
        await cluster.router.set_workers([])
        assert await release == 0
        stuck.set()


async def test_a_stop_string_ends_no_turn_before_its_min_tokens(stub: Stub) -> None:
    async def ask(**sampling) -> list[pb.GenerateResponse]:
        given = pb.Sampling(max_tokens=60, ignore_eos=True, **sampling)
        return [answer async for answer in stub.Generate(pb.GenerateRequest(text="Return the", sampling=given))]

    pieces = [answer.text for answer in await ask() if answer.tokens]
    assert len(pieces) == 60, "a token a message"
    before, after = "".join(pieces[:20]), "".join(pieces[20:])
    assert " " in before and " " in after
    stopped = await ask(stop=[" "], min_tokens=20)
    assert "".join(answer.text for answer in stopped) == before + after.partition(" ")[0]
    # What is shown for sure is shown at once.
    assert "".join(answer.text for answer in stopped if answer.index < 20) == before
    assert stopped[-1].finish_reason == "stop"
