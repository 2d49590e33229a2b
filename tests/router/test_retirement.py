"""A router hands its ports over to another: no connection is refused or cut, and streams go on to their end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest

from holdfast.errors import ConfigError
from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router.app import RouterServer
from router.listening import listen
from tests.harness import Harness, running
from tests.waiting import until
from workers.config import EngineConfig

NUM_TOKENS, NUM_ASKED = 1200, 15
PATIENT_S = 120
BODY = {"prompt": "Return the list of", "max_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 3, "ignore_eos": True}
SAMPLING = pb.Sampling(temperature=0.8, top_k=40, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    # A lease that a busy machine keeps.
    async with running(tmp_path, engine=EngineConfig(overlap_schedule=True), worker_lease_s=60.0) as harness:
        yield harness


async def successor_of(harness: Harness) -> RouterServer:
    """Another router on the same ports, as far as it is let."""
    port, grpc_port = harness.router._ports
    router = RouterServer(replace(harness.router.config, port=port, grpc_port=grpc_port))
    await router.set_workers(list(harness.addresses.values()))  # which it has not reached yet
    try:
        assert await router.start(shares_ports=True) == (port, grpc_port)
    except ConfigError:
        await router.core.close()
        await router._journal.close()
        raise
    return router


async def read(client: httpx.AsyncClient, session: str, begun: asyncio.Event, go_on: asyncio.Event) -> str:
    """A stream's lines; ``begun`` when some are there, the rest is read when the client may ``go_on``."""
    lines = list[str]()
    async with client.stream(
        "POST", "/v1/completions", json=BODY | {"stream": True}, headers={"X-Session-ID": session}
    ) as answer:
        async for line in answer.aiter_lines():
            lines.append(line.partition('"choices"')[2])
            if len(lines) == 40:
                begun.set()
                await go_on.wait()
    return "\n".join(lines)


async def read_grpc(stub: session_pb2_grpc.SessionServiceStub, begun: asyncio.Event, go_on: asyncio.Event) -> list[int]:
    tokens = list[int]()
    async for answer in stub.Generate(pb.GenerateRequest(text="Return the list of", sampling=SAMPLING)):
        tokens += answer.tokens
        if len(tokens) >= 40:
            begun.set()
            await go_on.wait()
    return tokens


async def test_streams_outlive_their_router_s_ports_and_no_connection_is_refused(harness: Harness) -> None:
    old, at_once = harness.router, asyncio.Event()
    at_once.set()
    async with (
        httpx.AsyncClient(base_url=harness.url, timeout=60) as client,
        httpx.AsyncClient(base_url=harness.url, timeout=60) as idle,
        grpc.aio.insecure_channel(harness.grpc_targets[0]) as channel,
    ):
        stub = session_pb2_grpc.SessionServiceStub(channel)
        calm = await read(client, "calm", asyncio.Event(), at_once)
        calm_grpc = await read_grpc(stub, asyncio.Event(), at_once)
        begun, go_on = [asyncio.Event() for _ in range(2)], asyncio.Event()
        live = asyncio.create_task(read(client, "live", begun[0], go_on))
        live_grpc = asyncio.create_task(read_grpc(stub, begun[1], go_on))
        await asyncio.gather(*(event.wait() for event in begun))
        settings = old._http.config
        usual_s, settings.timeout_keep_alive = settings.timeout_keep_alive, PATIENT_S  # of this connection alone
        assert (await idle.get("/health")).status_code == 200
        settings.timeout_keep_alive = usual_s
        old.share_ports()
        new = await successor_of(harness)
        harness.routers.append(new)
        retiring = asyncio.create_task(old.retire())
        for _ in range(NUM_ASKED):
            async with httpx.AsyncClient(base_url=harness.url, timeout=60) as fresh:
                answer = await fresh.get("/health")
                assert answer.status_code == 200 and answer.headers.get("connection") != "close", "the new one's"
        answer = await idle.get("/health")
        assert answer.status_code == 200 and answer.headers["connection"] == "close", "its connection was not cut"
        assert (await idle.get("/health")).headers.get("connection") != "close"
        assert not retiring.done() and not live.done() and not live_grpc.done()
        go_on.set()
        assert await live == calm and await live_grpc == calm_grpc
        await asyncio.wait_for(retiring, 30)
        harness.routers.remove(old)
        assert await read(client, "later", asyncio.Event(), at_once) == calm
        assert await read_grpc(stub, asyncio.Event(), at_once) == calm_grpc
        await until(lambda: not len(new.core.live), 10, "turns to end")


async def test_ports_that_are_not_shared_are_not_taken(harness: Harness) -> None:
    with pytest.raises(ConfigError, match=r"^port: \d+ of 127.0.0.1 cannot be bound"):
        await successor_of(harness)
    harness.router.share_ports()
    harness.router.share_ports(False)
    with pytest.raises(ConfigError, match=r"^port: \d+ of 127.0.0.1 cannot be bound"):
        await successor_of(harness)


def test_a_listener_shares_its_port_only_when_told() -> None:
    with listen("127.0.0.1", 0) as first:
        first.listen()
        for shared in (False, True):
            with pytest.raises(ConfigError):
                listen("127.0.0.1", first.getsockname()[1], shared=shared)
        assert not first.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT)
