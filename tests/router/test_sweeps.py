"""Workers keep nothing of sessions that left them, also where a turn arrives long after it was sent (law L12)."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from holdfast.errors import StaleEpoch
from holdfast.tokens import pack_tokens
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc, worker_pb2
from router.fleet import sweeper
from router.fleet.inbox import TurnInbox
from router.fleet.link import WorkerLink
from tests.harness import Harness, running
from tests.waiting import until

EVERY_S = 0.1


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "SWEEP_EVERY_S", EVERY_S)


async def say(stub: session_pb2_grpc.SessionServiceStub, session_id: str) -> None:
    sampling = pb.Sampling(max_tokens=4, ignore_eos=True)
    async for _ in stub.Generate(
        pb.GenerateRequest(session_id=session_id, tokens=pb.TokenIds(ids=range(10, 60)), sampling=sampling)
    ):
        pass


def late(link: WorkerLink, session_id: str, epoch: int) -> TurnInbox:
    """A turn whose router sent it under this epoch, and gave it up."""
    sampling = pb.Sampling(max_tokens=4, ignore_eos=True)
    tokens = pack_tokens(array("i", range(100, 150)))
    submit = worker_pb2.Submit(
        turn_id="late", session_id=session_id, epoch=epoch, tokens=tokens, prompt_len=50, sampling=sampling
    )
    return link.submit(submit)


def held(cluster: Harness, worker: str) -> set[str]:
    return set(cluster.workers[worker]._leader.cache.slots)


async def test_a_turn_that_arrives_after_its_session_left_leaves_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=2) as cluster, cluster.channel() as channel:
        stub, links = session_pb2_grpc.SessionServiceStub(channel), cluster.router.core.fleet._links
        await say(stub, "s")
        (there,) = [name for name in ("w0", "w1") if "s" in held(cluster, name)]
        (other,) = {"w0", "w1"} - {there}
        update = await late(links[f"{other}@1"], "s", 0).get(30.0)
        assert update is not None and "s" in held(cluster, other), "this worker has never heard of the session"
        await until(lambda: "s" not in held(cluster, other), 5, "what the late turn left to be freed")
        assert "s" in held(cluster, there), "where it lives, it stays"
        await cluster.assert_no_leak()


async def test_a_turn_that_arrives_after_a_sweep_freed_its_session_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1) as cluster, cluster.channel() as channel:
        stub, core = session_pb2_grpc.SessionServiceStub(channel), cluster.router.core
        await say(stub, "s")
        epoch = (await core.journal.owners(["s"]))["s"].epoch
        # Its worker is not told: as if it could not be reached.
        await core.journal.release("s", "")
        await until(lambda: "s" not in held(cluster, "w0"), 5, "the sweep")
        update = await late(core.fleet._links["w0@1"], "s", epoch).get(30.0)
        assert update is not None and update.error_code == StaleEpoch.code, update
        assert "s" not in held(cluster, "w0")
        await cluster.assert_no_leak()
