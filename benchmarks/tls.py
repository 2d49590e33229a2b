"""Mutual TLS between processes against clear text: a call, a new connection, a transfer of KV, a failover's pause.

Both take turns in one run. Caller and server share a process here, and with it its cores: what is sent is encrypted and
decrypted by the same two. The floor is clear text.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx

from benchmarks.common import save, serving
from benchmarks.failover import Clients
from cluster.authority import Authority
from holdfast import tls
from holdfast.tls import LEADER
from holdfast.v1 import kv_pb2, kv_pb2_grpc, session_pb2_grpc
from workers.serving.kv_transfer import CHUNK_BYTES

CALLS, CONNECTIONS, TRANSFER_CHUNKS, ROUNDS, FAILOVERS = 2000, 30, 512, 5, 4
HOST = "127.0.0.1"


class Pages(kv_pb2_grpc.KVServiceServicer):
    """Sends as many chunks of zeros as the transfer's id says, each as long as one of KV."""

    async def Read(self, request: kv_pb2.ReadRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[kv_pb2.Pages]:
        chunk = kv_pb2.Pages(data=bytes(CHUNK_BYTES))
        for _ in range(int(request.transfer_id)):
            yield chunk


@asynccontextmanager
async def server(authority: Authority | None) -> AsyncIterator[str]:
    tls.use_identity(authority.issue(LEADER) if authority is not None else None)
    serves = tls.server()
    kv_pb2_grpc.add_KVServiceServicer_to_server(Pages(), serves)
    port = tls.listen(serves, f"{HOST}:0")
    await serves.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        await serves.stop(None)
        tls.use_identity(None)


async def read(stub: Any, chunks: int) -> float:
    """Seconds that a transfer took."""
    began = time.perf_counter()
    async for _ in stub.Read(kv_pb2.ReadRequest(transfer_id=str(chunks))):
        pass
    return time.perf_counter() - began


async def links(authority: Authority | None) -> dict[str, float]:
    async with server(authority) as address:
        async with tls.channel(address) as channel:
            stub = kv_pb2_grpc.KVServiceStub(channel)
            await read(stub, 1)
            calls = [await read(stub, 0) for _ in range(CALLS)]
            transfer_s = await read(stub, TRANSFER_CHUNKS)
        connections = []
        for number in range(CONNECTIONS):
            # Channels with equal options share a connection.
            async with tls.channel(address, [("holdfast.number", number)]) as channel:
                connections.append(await read(kv_pb2_grpc.KVServiceStub(channel), 0))
    return {
        "a call, us": 1e6 * statistics.median(calls),
        "a call over a new connection, us": 1e6 * statistics.median(connections),
        "transfer, MB/s": TRANSFER_CHUNKS * CHUNK_BYTES / transfer_s / 1e6,
    }


async def pauses(*, insecure: bool) -> list[float]:
    """Of failovers, in milliseconds."""
    found = []
    async with (
        serving(workers=2, max_total_tokens=32_768, insecure_internal=insecure) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
        grpc.aio.insecure_channel(cluster.grpc_url.removeprefix("grpc://")) as channel,
    ):
        clients = Clients(session_pb2_grpc.SessionServiceStub(channel), http)
        for number in range(FAILOVERS):
            found.append(1000 * (await clients.round(number))["total"])
            while len(await clients.workers()) < 2:
                await asyncio.sleep(0.2)
    return found


async def measure() -> dict[str, Any]:
    authority, rows = Authority(), []
    for _ in range(ROUNDS):
        rows.append((await links(None), await links(authority)))
    figures: dict[str, Any] = {}
    for name in rows[0][0]:
        clear, secure = (statistics.median(pair[i][name] for pair in rows) for i in (0, 1))
        ratio = statistics.median(pair[1][name] / pair[0][name] for pair in rows)
        figures[name] = {"clear text": round(clear, 1), "TLS": round(secure, 1), "TLS over clear text": round(ratio, 2)}
    clear_ms, tls_ms = [statistics.median(await pauses(insecure=insecure)) for insecure in (True, False)]
    figures["a failover's pause, ms"] = {
        "clear text": round(clear_ms, 1),
        "TLS": round(tls_ms, 1),
        "TLS over clear text": round(tls_ms / clear_ms, 2),
    }
    return figures


def main() -> None:
    save("tls", asyncio.run(measure()))


if __name__ == "__main__":
    main()
