"""What the next release is tested against: this one's messages, and a journal as it writes it.

``python -m tests.compatibility.keep_release``, when a release is made.
"""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from redis.asyncio import Redis

from holdfast.v1 import kv_pb2, rank_pb2, session_pb2, session_pb2_grpc, store_pb2, worker_pb2
from holdfast.v1 import session_pb2 as pb
from tests.harness import Harness, running
from tests.redis_server import redis_server

RELEASE = Path(__file__).parent / "release"
WIRE, SQLITE, REDIS, WRITTEN = (RELEASE / name for name in ("wire.binpb", "journal.db", "journal.json", "written.json"))
SAMPLING = pb.Sampling(temperature=0.8, top_k=40, seed=3, max_tokens=24, ignore_eos=True)
TURNS = ("Return the list of", " What does it return?")
"""The second is left open."""
TALK, TURN, GONE = "talk", "turn-2", "gone"
SEEN = 10


def descriptors() -> FileDescriptorSet:
    """Of this version's messages and services."""
    files = FileDescriptorSet()
    for module in (session_pb2, worker_pb2, rank_pb2, kv_pb2, store_pb2):  # what is imported comes first
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


def request(session: str, turn: int, **more: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(session_id=session, text=TURNS[turn], sampling=SAMPLING, **more)


async def write(cluster: Harness) -> dict[str, Any]:
    """A session with a turn that a lost router leaves open, one that was released, and a response."""
    async with cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        for session in (TALK, GONE):
            async for _ in stub.Generate(request(session, 0)):
                pass
        await stub.Release(pb.ReleaseRequest(session_id=GONE))
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
            body = {"model": "holdfast-tiny", "input": "Return the list of", "max_output_tokens": 8}
            response = (await http.post("/v1/responses", json=body)).raise_for_status().json()
        stream, seen = stub.Generate(request(TALK, 1, request_id=TURN)), list[int]()
        async for answer in stream:
            seen += answer.tokens
            if len(seen) >= SEEN:
                break
        cluster.lose_router()
        stream.cancel()
    return {"seen": seen, "response": response}


async def keep() -> None:
    RELEASE.mkdir(exist_ok=True)
    WIRE.write_bytes(descriptors().SerializeToString(deterministic=True))
    written = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with running(folder, num_workers=1) as cluster:
            written["sqlite"] = await write(cluster)
        SQLITE.write_bytes((folder / "journal.db").read_bytes())
        with redis_server(folder / "redis") as server:
            async with running(folder, num_workers=1, journal_url=server.url) as cluster:
                written["redis"] = await write(cluster)
            async with Redis.from_url(server.url) as client:
                keys = sorted(await client.keys())
                dumps = {base64.b64encode(key).decode(): await client.dump(key) for key in keys}
    stored = {key: base64.b64encode(dump).decode() for key, dump in dumps.items() if dump is not None}
    REDIS.write_text(json.dumps(stored, indent=0) + "\n")
    WRITTEN.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(keep())
