"""A worker is lost mid-stream: the client's stream continues with the same tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from openai import AsyncOpenAI

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from tests.harness import ENGINE, Harness, running
from tests.waiting import until
from workers.serving.bandwidth import Bandwidth

SAMPLING = {"temperature": 0.9, "seed": 11, "max_tokens": 60, "ignore_eos": True, "top_k": 50}
GRAMMAR = pb.Grammar(regex=r"([0-9]{2}[a-f]{3}){30}")
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}


async def stream_turn(stub, session: str, on_token: int = -1, act=None, **sampling) -> list[int]:
    request = pb.GenerateRequest(
        session_id=session,
        tokens=pb.TokenIds(ids=[100, 200, 300]),
        sampling=pb.Sampling(**(SAMPLING | sampling)),
    )
    tokens: list[int] = []
    async for answer in stub.Generate(request):
        assert answer.index == len(tokens), "a token came twice or was lost"
        tokens += answer.tokens
        if act is not None and len(tokens) >= on_token:
            await act()
            act = None
    return tokens


@pytest.mark.parametrize("extra", [{}, PENALTIES, {"temperature": 0.0}, {"logprobs": 2}, {"grammar": GRAMMAR}], ids=str)
async def test_a_stream_continues_with_the_same_tokens(cluster: Harness, extra: dict) -> None:
    async with cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        expected = await stream_turn(stub, "calm", **extra)
        follow_up = await stream_turn(stub, "calm", **extra)

        async def lose() -> None:
            await cluster.lose_worker(cluster.pinned_to("storm"))

        assert await stream_turn(stub, "storm", 20, lose, **extra) == expected
        assert await stream_turn(stub, "storm", **extra) == follow_up, "the session continues from there"
        session = await stub.Get(pb.GetRequest(session_id="storm"))
        assert session.epoch == 2 and session.num_tokens == 2 * (3 + 60)


def recomputed(cluster: Harness, reason: str) -> float:
    return cluster.router.core.metrics.recomputed.labels(reason)._value.get()


async def test_what_is_computed_again_is_counted_by_reason(cluster: Harness) -> None:
    async with cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        await stream_turn(stub, "s")
        await stream_turn(stub, "s")
        assert not any(recomputed(cluster, reason) for reason in ("failover", "moved", "evicted")), "all was there"
        cluster.workers[cluster.pinned_to("s")]._leader.flush()
        await stream_turn(stub, "s")
        assert recomputed(cluster, "evicted") == 2 * 63 - 1
        await cluster.lose_worker(cluster.pinned_to("s"))
        await stream_turn(stub, "s")
        assert (recomputed(cluster, "moved"), recomputed(cluster, "failover")) == (3 * 63 - 1, 0)
        await stream_turn(stub, "t")
        assert recomputed(cluster, "moved") == 3 * 63 - 1, "a new session had computed nothing before"


async def test_what_a_lost_worker_had_computed_is_counted(cluster: Harness) -> None:
    async with cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        await stream_turn(stub, "s", 20, lambda: cluster.lose_worker(cluster.pinned_to("s")))
        assert 3 + 20 - 1 <= recomputed(cluster, "failover") < 3 + 60
        assert not recomputed(cluster, "moved") and not recomputed(cluster, "evicted")


async def test_each_input_token_is_scored_once(cluster: Harness) -> None:
    async def scored(session: str, lose: bool) -> list[float]:
        sampling = pb.Sampling(**(SAMPLING | {"logprobs": 1, "logprob_start": 1}))
        request = pb.GenerateRequest(session_id=session, tokens=pb.TokenIds(ids=range(100, 140)), sampling=sampling)
        logprobs, num_tokens, is_lost = [], 0, not lose
        async for answer in stub.Generate(request):
            logprobs += [scored.logprob for scored in answer.input_logprobs]
            num_tokens += len(answer.tokens)
            if num_tokens >= 10 and not is_lost:
                is_lost = True
                await cluster.lose_worker(cluster.pinned_to(session))
        assert num_tokens == 60
        return logprobs

    async with cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        expected = await scored("calm", lose=False)
        assert len(expected) == 38
        assert await scored("storm", lose=True) == pytest.approx(expected, abs=1e-4)


async def test_request_without_a_session_survives_too(cluster: Harness) -> None:
    async with cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        expected = await stream_turn(stub, "")

        async def lose() -> None:
            busy = next(name for name, w in cluster.workers.items() if w._leader.scheduler.running)
            await cluster.lose_worker(busy)

        assert await stream_turn(stub, "", 20, lose) == expected


async def test_idle_session_moves_at_its_next_turn(cluster: Harness) -> None:
    async with cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        for session in ("calm", "storm"):
            await stream_turn(stub, session)
        expected = await stream_turn(stub, "calm")
        await cluster.lose_worker(cluster.pinned_to("storm"))
        await cluster.announce()
        assert await stream_turn(stub, "storm") == expected


async def test_a_turn_does_not_wait_for_a_worker_lost_before_its_submission(cluster: Harness) -> None:
    async with cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        for session in ("calm", "storm"):
            await stream_turn(stub, session)
        expected = await stream_turn(stub, "calm")
        core = cluster.router.core
        link = core.fleet.link(core.sessions._sessions["storm"].record.worker)
        begin_turn = core.journal.begin_turn

        async def lose_and_begin(*turn: object) -> None:
            await cluster.lose_worker(link.address.worker_id)
            await cluster.announce()
            await begin_turn(*turn)

        core.journal.begin_turn = lose_and_begin
        async with asyncio.timeout(20):
            assert await stream_turn(stub, "storm") == expected


async def test_no_worker_is_503_within_the_deadline_and_service_returns(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1, worker_wait_s=0.5) as cluster:
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            args = {"model": "holdfast-tiny", "prompt": "Return", "max_tokens": 4, "temperature": 0}
            args["extra_headers"] = {"X-Session-ID": "s"}
            expected = await client.completions.create(**args)
            await cluster.lose_worker("w0")
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(**args)
            assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
            assert caught.value.code == "no_worker_available"
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"{cluster.url}/health")).status_code == 503
            await cluster.start_worker("w0", 2, ENGINE)
            assert (await client.completions.create(**args)).choices[0].text == expected.choices[0].text
        await cluster.assert_no_leak()


async def rest_of(stub, session: str, turn_id: str, seen: list[int]) -> list[int]:
    """The rest of a turn, from any router that resumes it."""
    request = pb.GenerateRequest(session_id=session, request_id=turn_id, resume_from=len(seen))
    return seen + [token async for answer in stub.Generate(request) for token in answer.tokens]


async def test_a_turn_without_a_worker_keeps_what_its_client_has_seen(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1, num_routers=2, worker_wait_s=0.3) as cluster:
        async with cluster.channel() as channel, cluster.channel(1) as other:
            stub, second = (session_pb2_grpc.SessionServiceStub(c) for c in (channel, other))
            expected = await stream_turn(stub, "calm")
            seen: list[int] = []
            request = pb.GenerateRequest(
                session_id="s",
                tokens=pb.TokenIds(ids=[100, 200, 300]),
                sampling=pb.Sampling(**SAMPLING),
                request_id="t",
            )
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for answer in stub.Generate(request):
                    seen += answer.tokens
                    if len(seen) == 10:
                        await cluster.lose_worker("w0")
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE and 10 <= len(seen) < 60
            await cluster.start_worker("w0", 2, ENGINE)
            # Its router lives, and does not run it: any router can resume it.
            assert await rest_of(second, "s", "t", seen) == expected
            assert (await stub.Get(pb.GetRequest(session_id="s"))).num_tokens == 63
        await cluster.assert_no_leak()


async def test_a_router_that_is_stopped_leaves_its_turns_to_the_others(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1, num_routers=2, drain_timeout_s=0.05) as cluster:
        async with cluster.channel() as channel, cluster.channel(1) as other:
            stub, second = (session_pb2_grpc.SessionServiceStub(c) for c in (channel, other))
            expected = await stream_turn(stub, "calm", max_tokens=400)
            seen: list[int] = []
            sampling = pb.Sampling(**(SAMPLING | {"max_tokens": 400}))
            tokens = pb.TokenIds(ids=[100, 200, 300])
            stopping = None
            with pytest.raises(grpc.aio.AioRpcError):
                async for answer in stub.Generate(
                    pb.GenerateRequest(session_id="s", tokens=tokens, sampling=sampling, request_id="t")
                ):
                    seen += answer.tokens
                    stopping = stopping or asyncio.create_task(cluster.routers.pop(0).stop())
            assert stopping is not None and 0 < len(seen) < 400
            await stopping
            assert await rest_of(second, "s", "t", seen) == expected
        await cluster.assert_no_leak()


async def test_turn_waits_out_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        expected = await stream_turn(stub, "calm")

        async def restart() -> None:
            await cluster.lose_worker("w0")
            await cluster.start_worker("w0", 2, ENGINE)

        assert await stream_turn(stub, "storm", 10, restart) == expected
        await cluster.assert_no_leak()


async def test_full_queue_is_429_with_retry_after(tmp_path: Path) -> None:
    engine = replace(ENGINE, max_running_requests=1, max_queued_requests=1)
    async with running(tmp_path, num_workers=1, engine=engine) as cluster:
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            args = {"model": "holdfast-tiny", "prompt": "Return", "max_tokens": 120}
            args["extra_body"] = {"ignore_eos": True}
            answers = await asyncio.gather(
                *(client.completions.create(**args) for _ in range(6)), return_exceptions=True
            )
        refused = [a for a in answers if isinstance(a, openai.RateLimitError)]
        assert refused and len(refused) < 6, answers
        assert all(a.response.headers["retry-after"] for a in refused)
        assert all(a.usage.completion_tokens == 120 for a in answers if not isinstance(a, Exception))
        await cluster.assert_no_leak()


async def test_router_limit_is_429(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1, max_live_turns=2) as cluster:
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            args = {"model": "holdfast-tiny", "prompt": "Return", "max_tokens": 60}
            answers = await asyncio.gather(
                *(client.completions.create(**args) for _ in range(5)), return_exceptions=True
            )
        assert sum(isinstance(a, openai.RateLimitError) for a in answers) == 3
        await cluster.assert_no_leak()


async def test_sessions_survive_a_restart_of_everything(tmp_path: Path) -> None:
    async with running(tmp_path) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        for session in ("calm", "storm"):
            await stream_turn(stub, session)
        expected = await stream_turn(stub, "calm")
        call = stub.Generate(pb.GenerateRequest(session_id="storm", text="x", sampling=pb.Sampling(ignore_eos=True)))
        await call.read()
        for worker in cluster.workers.values():  # a turn is under way as everything goes down, however fast it is
            worker._leader.scheduler.paused = True
    async with running(tmp_path) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        assert (await stub.Get(pb.GetRequest(session_id="storm"))).num_tokens == 63
        assert await stream_turn(stub, "storm") == expected
        await cluster.assert_no_leak()


async def test_silent_worker_is_lost_within_its_lease(tmp_path: Path) -> None:
    """A worker whose stream stays open but says nothing: the turn moves when the lease is over."""
    async with running(tmp_path, worker_lease_s=0.8) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        expected = await stream_turn(stub, "calm")
        name = cluster.pinned_to("calm")

        async def silence() -> None:
            worker = cluster.workers[cluster.pinned_to("storm")]
            worker._stream_of.clear()
            worker._beat_interval_s = 60.0

        assert await stream_turn(stub, "storm", 10, silence) == expected
        assert name in cluster.workers


async def test_a_drained_worker_s_turns_and_sessions_continue_elsewhere(
    cluster: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine it may look as if computing were faster than migrating.
    monkeypatch.setattr(Bandwidth, "refuse_slow", lambda self, pending: None)
    async with cluster.channel() as channel, httpx.AsyncClient(base_url=cluster.url, timeout=30) as http:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        expected = await stream_turn(stub, "calm")
        follow_up = await stream_turn(stub, "calm")
        assert await stream_turn(stub, "idle") == expected
        # The turn that is disturbed runs where the idle session is.
        drained: list[str] = []

        async def drain() -> None:
            drained.append(cluster.pinned_to("storm"))
            answer = await http.post(f"/holdfast/workers/{drained[0]}/drain", params={"timeout_s": 0})
            report = answer.json()
            assert (report["worker_id"], report["turns_preempted"], report["sessions_left"]) == (drained[0], 1, 0)

        assert await stream_turn(stub, "storm", 20, drain) == expected, "moved in the middle"
        for session in ("idle", "storm"):
            assert await stream_turn(stub, session) == follow_up
            assert cluster.pinned_to(session) != drained[0]
        assert not cluster.workers[drained[0]]._leader.scheduler.turns
        await cluster.assert_no_leak()
        unknown = await http.post("/holdfast/workers/nobody/drain")
        assert unknown.status_code == 404 and "alive: w0, w1" in unknown.text


async def test_a_drain_waits_for_short_turns_and_their_ends(cluster: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = cluster.router.core.journal
    complete = journal.complete_turn

    async def late(*given: Any) -> None:
        await asyncio.sleep(0.4)
        await complete(*given)

    async with cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        expected = await stream_turn(stub, "calm")
        answers: list[int] = []

        async def drain() -> None:
            answer = await cluster.router.core.migrator.drain(cluster.pinned_to("storm"), 20.0)
            answers.append(answer["turns_preempted"])

        monkeypatch.setattr(journal, "complete_turn", late)
        stream = asyncio.create_task(stream_turn(stub, "storm"))
        await until(lambda: cluster.router.core.sessions.running_turn("storm"), 5, "the turn to run")
        await drain()
        assert await stream == expected and answers == [0]
        assert (await stub.Get(pb.GetRequest(session_id="storm"))).epoch == 2, "then it moved, with its KV"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_turn_that_kills_its_workers_fails_before_it_has_killed_all(tmp_path: Path) -> None:
    lost = []

    def fail_at(cluster: Harness, worker: str, poison: int) -> None:
        """Have the worker's engine fail as soon as it computes a turn of ``poison`` tokens."""
        server, loop = cluster.workers[worker], asyncio.get_running_loop()
        choose = server._leader.rank.choose

        def failing(work, masks=None):
            if any(w.turn.params.max_tokens == poison for w in work):
                raise ArithmeticError("nobody thought of this")
            return choose(work, masks)

        def end(reason: str) -> None:
            assert "nobody thought of this" in reason
            lost.append(worker)
            loop.call_soon_threadsafe(lambda: lost.append(loop.create_task(cluster.lose_worker(worker))))

        server._leader.rank.choose = failing
        server._on_lost = end

    async with running(tmp_path, num_workers=3, max_failovers=1) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        first = await stream_turn(stub, "s", max_tokens=5)
        for worker in cluster.workers:
            fail_at(cluster, worker, poison=13)
        with pytest.raises(grpc.aio.AioRpcError, match="the turn failed over 1 times") as caught:
            await stream_turn(stub, "s", max_tokens=13)
        assert ("holdfast-code", "turn_failed") in tuple(caught.value.trailing_metadata() or ())
        await asyncio.gather(*(task for task in lost if isinstance(task, asyncio.Task)))
        assert len(cluster.workers) == 1, "one worker is left"
        # The session is as it was before that turn, and continues there.
        session = await stub.Get(pb.GetRequest(session_id="s"))
        assert session.num_tokens == 3 + len(first) and session.num_turns == 1
        assert len(await stream_turn(stub, "s", max_tokens=5)) == 5
        await cluster.assert_no_leak()
