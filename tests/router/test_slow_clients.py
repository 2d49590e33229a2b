"""Clients that send slowly, or read nothing, over real sockets: they are cut off, and others notice nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router import connections
from tests.harness import Harness, running
from tests.waiting import until

TIMEOUT_S = 1.5
BODY = {"model": "holdfast-tiny", "prompt": "Return the", "max_tokens": 4, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 3500, "stream": True, "logprobs": 5}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Harness]:
    async with running(tmp_path, num_workers=1, client_timeout_s=TIMEOUT_S, max_connections=4) as cluster:
        yield cluster


async def connect(cluster: Harness, *, narrow: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection. ``narrow``: what is not read is soon the server's."""
    plain = socket.socket()
    if narrow:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    plain.setblocking(False)
    address = httpx.URL(cluster.urls[0])
    await asyncio.get_running_loop().sock_connect(plain, (address.host, address.port))
    return await asyncio.open_connection(sock=plain, limit=2048)


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return f"{head}\r\n\r\n".encode() + data


async def drip(writer: asyncio.StreamWriter, data: bytes, pause_s: float) -> None:
    """Send byte by byte until the server has enough of it."""
    for byte in data:
        if writer.is_closing():
            return
        writer.write(bytes([byte]))
        await asyncio.sleep(pause_s)


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(20):
        try:
            return await reader.read(-1)
        except ConnectionResetError:
            return b""


async def served(cluster: Harness) -> int:
    async with httpx.AsyncClient(base_url=cluster.urls[0], timeout=20) as http:
        return (await http.post("/v1/completions", json=BODY)).status_code


@pytest.mark.parametrize("sent", [0, 20, len(request(BODY)) - 10], ids=["nothing", "headers", "body"])
async def test_a_request_that_arrives_slowly_is_refused(cluster: Harness, sent: int) -> None:
    reader, writer = await connect(cluster)
    data = request(BODY)
    writer.write(data[: max(0, sent - 10)])
    dripping = asyncio.create_task(drip(writer, data[max(0, sent - 10) : sent], 0.15))
    assert await served(cluster) == 200
    answer = await answer_of(reader)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive in time" in answer
    dripping.cancel()
    writer.close()
    assert await served(cluster) == 200


async def test_the_second_request_of_a_connection_has_its_deadline_too(cluster: Harness) -> None:
    reader, writer = await connect(cluster)
    for _ in range(2):
        writer.write(request(BODY))
        assert b"200 OK" in await reader.readuntil(b"}]")
    writer.write(request(BODY)[:-5])
    assert b" 408 " in await answer_of(reader)
    writer.close()


async def test_a_long_request_has_longer(cluster: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MIN_BYTES_PER_S", 1000)
    reader, writer = await connect(cluster)
    data = request({**BODY, "user": "x" * 4000})
    for first in range(0, len(data), 200):
        writer.write(data[first : first + 200])
        await asyncio.sleep(0.15)  # 3.2 s in all
    assert b"200 OK" in await reader.readuntil(b"}]")
    writer.close()


async def test_a_turn_whose_client_reads_nothing_is_aborted(cluster: Harness) -> None:
    reader, writer = await connect(cluster, narrow=True)
    writer.write(request(LONG))
    await reader.readuntil(b"data: ")
    live = cluster.routers[0].core.live
    assert len(live) == 1
    assert await served(cluster) == 200
    await until(lambda: len(live) == 0, 30, "the turn to end")
    assert b"[DONE]" not in await answer_of(reader), "it was cut"
    writer.close()
    assert await served(cluster) == 200


async def test_a_grpc_call_whose_answers_are_not_read_is_ended(cluster: Harness) -> None:
    live = cluster.routers[0].core.live
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(cluster.grpc_targets[0], options=options) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        sampling = pb.Sampling(max_tokens=3500, ignore_eos=True, logprobs=20)
        call = stub.Generate(pb.GenerateRequest(session_id="s", text="Return the", sampling=sampling))
        await call.read()
        assert len(live) == 1
        await until(lambda: len(live) == 0, 30, "the turn to end")
        with pytest.raises(grpc.aio.AioRpcError, match=r"was not read within 1\.5 s"):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert [answer async for answer in stub.Generate(pb.GenerateRequest(session_id="t", text="Return"))]


async def test_more_connections_than_the_limit_are_refused_and_the_others_served(cluster: Harness) -> None:
    held = [await connect(cluster) for _ in range(4)]
    reader, writer = await connect(cluster)
    assert (await answer_of(reader)).startswith(b"HTTP/1.1 503 ")
    held[0][1].write(request(BODY))
    assert b"200 OK" in await held[0][0].readuntil(b"}]")
    for _, each in [*held, (reader, writer)]:
        each.close()


async def test_headers_without_end_are_refused(cluster: Harness) -> None:
    reader, writer = await connect(cluster)
    writer.write(b"GET /health HTTP/1.1\r\nHost: h\r\nX-Long: " + b"x" * (connections.MAX_HEADER_BYTES + 1))
    assert b" 400 " in await answer_of(reader)
    writer.close()
