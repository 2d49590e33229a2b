"""A journal of the last release: its sessions, its open turn, what was released, its responses."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from redis.asyncio import Redis

from holdfast.errors import SessionReleased
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from holdfast.wire import error_from_rpc
from tests.compatibility.keep_release import GONE, REDIS, SAMPLING, SQLITE, TALK, TURN, WRITTEN, request
from tests.harness import Harness, running
from tests.redis_server import redis_server


@pytest.fixture(params=["sqlite", "redis"])
async def upgraded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Harness, dict[str, Any]]]:
    """A cluster over that release's journal, and what was written there."""
    with ExitStack() as stack:
        settings: dict[str, Any] = {}
        if request.param == "sqlite":
            shutil.copy(SQLITE, tmp_path / "journal.db")
        else:
            settings["journal_url"] = stack.enter_context(redis_server(tmp_path / "redis")).url
            async with Redis.from_url(settings["journal_url"]) as client:
                for key, dump in json.loads(REDIS.read_text()).items():
                    await client.restore(base64.b64decode(key), 0, base64.b64decode(dump))
        async with running(tmp_path, num_workers=1, **settings) as cluster:
            yield cluster, json.loads(WRITTEN.read_text())[request.param]


async def tokens_of(stub: Any, asked: pb.GenerateRequest) -> list[int]:
    return [token async for answer in stub.Generate(asked) for token in answer.tokens]


async def test_a_journal_of_the_last_release_is_taken_over(upgraded: tuple[Harness, dict[str, Any]]) -> None:
    cluster, written = upgraded
    async with cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        await tokens_of(stub, request("calm", 0))
        calm = await tokens_of(stub, request("calm", 1))
        seen = written["seen"]
        resumed = pb.GenerateRequest(session_id=TALK, request_id=TURN, resume_from=len(seen))
        assert seen + await tokens_of(stub, resumed) == calm, "the turn that was left open"
        sessions = {name: await stub.Get(pb.GetRequest(session_id=name)) for name in (TALK, "calm")}
        assert sessions[TALK].num_tokens == sessions["calm"].num_tokens
        more = pb.GenerateRequest(text=" And then?", sampling=SAMPLING)
        more.session_id = TALK
        again = await tokens_of(stub, more)
        more.session_id = "calm"
        assert again == await tokens_of(stub, more)
        with pytest.raises(grpc.aio.AioRpcError) as released:
            await tokens_of(stub, request(GONE, 0))
        assert isinstance(error_from_rpc(released.value), SessionReleased)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
        response = (await http.get(f"/v1/responses/{written['response']['id']}")).raise_for_status().json()
        assert response == written["response"]
    await cluster.assert_no_leak()
