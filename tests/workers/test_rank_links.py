"""Leader and followers over real gRPC, in this process: leases, identities, the control plane end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest

from holdfast.v1 import rank_pb2, rank_pb2_grpc, session_pb2_grpc, worker_pb2, worker_pb2_grpc
from holdfast.v1 import session_pb2 as pb
from tests.harness import ENGINE, running, start_group, stop_group
from tests.waiting import until
from workers.engine.step_log import LogWriter
from workers.serving.rank_links import RankLinks

SHORT_LEASE = replace(ENGINE, rank_lease_s=0.6)


async def test_a_leader_that_falls_silent_is_lost_to_its_ranks() -> None:
    lost: list[str] = []
    leader, followers, _ = await start_group("w", 1, SHORT_LEASE, 2, lost.append)
    for task in leader._links._tasks:
        if task.get_coro().__name__ == "_write":  # type: ignore[union-attr]
            task.cancel()
    await until(lambda: any("the leader was silent for 0.6 s" in reason for reason in lost), 5, "the lease to lapse")
    await stop_group(leader, followers)


async def test_a_rank_that_falls_silent_is_lost_to_its_leader() -> None:
    lost: list[str] = []
    leader, followers, _ = await start_group("w", 1, SHORT_LEASE, 2, lost.append)
    followers[0]._lease_s = 1000.0  # beats come too rarely
    await until(lambda: "rank 1 was silent for 0.6 s" in lost, 5, "the lease to lapse")
    await stop_group(leader, followers)


async def test_an_idle_group_lives_on() -> None:
    lost: list[str] = []
    leader, followers, _ = await start_group("w", 1, SHORT_LEASE, 2, lost.append)
    rounds = 0

    def later() -> bool:
        nonlocal rounds
        rounds += 1
        return rounds > 150  # of 10 ms each: more than two leases

    await until(later, 10, "time to pass")
    assert not lost
    await stop_group(leader, followers)
    assert not lost, "an end that was announced is no loss"


async def test_a_rank_has_one_leader_in_its_life() -> None:
    leader, followers, _ = await start_group("w", 1, ENGINE, 2, print)
    second = rank_pb2_grpc.RankServiceStub(leader._links._channels[1]).Follow()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await second.read()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await stop_group(leader, followers)


async def test_a_rank_of_another_incarnation_is_refused_at_hello() -> None:
    class Impostor(rank_pb2_grpc.RankServiceServicer):
        async def Follow(self, requests, context):  # type: ignore[no-untyped-def]
            yield rank_pb2.RankMessage(hello=rank_pb2.RankHello(rank=1, incarnation=6, digest=5))

    server = grpc.aio.server()
    rank_pb2_grpc.add_RankServiceServicer_to_server(Impostor(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    links = RankLinks(1.0, print)
    with pytest.raises(Exception, match="rank 1 is not configured like its leader"):
        await links.connect({1: f"127.0.0.1:{port}"}, LogWriter(7, 1), 5, 5.0)
    await links.stop()
    await server.stop(None)


async def test_sessions_on_two_ranks_end_to_end(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1, tp=2) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)

        async def turn(session: str, **more: object) -> list[int]:
            sampling = pb.Sampling(max_tokens=8, ignore_eos=True)
            request = pb.GenerateRequest(session_id=session, text="Return the list", sampling=sampling, **more)
            return [token async for answer in stub.Generate(request) for token in answer.tokens]

        first = await turn("s")
        await turn("s")
        await stub.Fork(pb.ForkRequest(session_id="s", child_id="fork"))
        await stub.FreeTail(pb.FreeTailRequest(session_id="s", keep_len=0))
        assert await turn("s") == first
        address = cluster.addresses["w0"].address
        async with grpc.aio.insecure_channel(address) as direct:
            worker = worker_pb2_grpc.WorkerServiceStub(direct)
            audit = await worker.Audit(worker_pb2.AuditRequest())
            assert audit.ok and len(audit.ranks) == 2 and audit.ranks[0].digest == audit.ranks[1].digest != 0
            stats = await worker.Stats(worker_pb2.StatsRequest())
            assert [rank.lag for rank in stats.ranks] == [0, 0]
            async with httpx.AsyncClient() as http:
                metrics = (await http.get(stats.metrics_url)).text
            assert 'holdfast_rank_lag_entries{rank="1",worker="w0"} 0.0' in metrics
            assert 'holdfast_worker_events_total{event="turns",worker="w0"} 3.0' in metrics
            released = await worker.Release(worker_pb2.WorkerReleaseRequest(session_id="fork", epoch=1))
            assert [rank.pages_freed for rank in released.ranks] == [released.ranks[0].pages_freed] * 2
            assert {rank.log_index for rank in released.ranks} == {released.log_index}
        assert (await stub.Release(pb.ReleaseRequest(session_id="s"))).pages_freed > 0
        await cluster.assert_no_leak()
        for server in (cluster.workers["w0"]._leader.rank, cluster.followers["w0"][0].follower.rank):
            assert not server.cache.slots


async def test_acks_that_cannot_be_taken_end_the_group_rather_than_its_answers() -> None:
    lost: list[str] = []
    leader, followers, _ = await start_group("w", 1, ENGINE, 2, lost.append)

    def fail(rank: int, ack: rank_pb2.Ack) -> None:
        raise KeyError(rank)

    leader._leader.log.ack = fail  # type: ignore[method-assign]
    leader._leader.flush()
    await until(lambda: "rank 1 cannot be read: KeyError(1)" in lost, 5, "the leader to notice")
    await stop_group(leader, followers)
