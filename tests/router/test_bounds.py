"""A router's limits, and the errors beyond them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from holdfast.v1 import session_pb2 as pb
from holdfast.v1 import session_pb2_grpc
from router.access.keys import Limits, given_key, new_key
from tests.harness import Harness, running
from tests.waiting import until

KEYS = ("mine", "yours")
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


def keyed(cluster: Harness, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=cluster.url, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def prompt(max_tokens: int) -> dict[str, Any]:
    return {"prompt": "Return the", "max_tokens": max_tokens, "ignore_eos": True}


async def test_one_tenant_s_turns_leave_room_for_another_s(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1, api_keys=tuple(map(given_key, KEYS)), max_live_turns=4) as cluster:
        async with keyed(cluster, "mine") as mine, keyed(cluster, "yours") as yours:
            long = [asyncio.create_task(mine.post("/v1/completions", json=prompt(400))) for _ in range(2)]
            await until(lambda: len(cluster.router.core.live) == 2, 10, "two turns")
            refused = await mine.post("/v1/completions", json=prompt(1))
            assert refused.status_code == 429 and refused.headers["retry-after"]
            assert "2 of your turns" in refused.json()["error"]["message"]
            assert (await yours.post("/v1/completions", json=prompt(2))).status_code == 200
            assert [(await task).status_code for task in long] == [200, 200]
            assert (await mine.post("/v1/completions", json=prompt(1))).status_code == 200
        await cluster.assert_no_leak()


async def test_open_sessions_of_a_tenant_are_limited(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1, max_sessions_per_tenant=1) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)
        await stub.Open(pb.OpenRequest(session_id="a"))
        try:
            await stub.Open(pb.OpenRequest(session_id="b"))
            raise AssertionError("it was opened")
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert ("holdfast-code", "too_many_sessions") in tuple(error.trailing_metadata() or ())
        await stub.Release(pb.ReleaseRequest(session_id="a"))
        await stub.Open(pb.OpenRequest(session_id="b"))


async def test_a_keys_tenant_has_the_sessions_that_the_key_says(tmp_path: Path) -> None:
    """Each of them may open the same ids. Without a limit of its own a tenant has the cluster's."""
    (small, a), (large, b) = new_key("a", limits=Limits(max_sessions=1)), new_key("b")
    given: Any = {"api_keys": (a, b), "max_sessions_per_tenant": 2}
    async with running(tmp_path, num_workers=1, **given) as cluster, cluster.channel() as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)

        async def opened(key: str, count: int) -> list[bool]:
            found = []
            for i in range(count):
                try:
                    metadata = (("authorization", f"Bearer {key}"),)
                    await stub.Open(pb.OpenRequest(session_id=f"s{i}"), metadata=metadata)
                    found.append(True)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    found.append(False)
            return found

        assert await opened(small, 3) == [True, False, False]
        assert await opened(large, 3) == [True, True, False]


async def test_responses_and_conversations_in_the_journal_are_limited(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1, max_sessions_per_tenant=1) as cluster:
        journal, context_len = cluster.router.core.journal, cluster.router.core.fleet.context_len
        async with httpx.AsyncClient(base_url=f"{cluster.url}/v1", timeout=30) as http:
            made = (await http.post("/conversations", json={})).json()["id"]
            for path, body in (("conversations", {}), ("responses", {"input": "Hello"})):
                refused = await http.post(f"/{path}", json=body)
                assert refused.status_code == 429 and refused.json()["error"]["code"] == "too_many_sessions"
            assert [key for key, _ in await journal.list_objects("", "conversation/")] == [f"conversation/{made}"]
            assert not await journal.list_objects("", "response/"), "its client got the error instead"
            item = {"role": "user", "content": "a"}
            known = {f"items/{made}/{i:012d}": json.dumps(item).encode() for i in range(context_len - 1)}
            await journal.put_objects("", known)
            more = f"/conversations/{made}/items"
            assert (await http.post(more, json={"items": [item]})).status_code == 200
            full = await http.post(more, json={"items": [item]})
            assert full.status_code == 400 and f"at most {context_len}" in full.json()["error"]["message"]
            assert (await http.delete(f"/conversations/{made}")).status_code == 200
            assert (await http.post("/responses", json={"input": "Hello", "max_output_tokens": 1})).status_code == 200


async def test_a_turn_past_its_deadline_gets_504(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1, turn_deadline_s=0.3) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as http:
            late = await http.post("/v1/completions", json=prompt(3000))
            assert late.status_code == 504 and "not done within 0.3 s" in late.json()["error"]["message"]
            assert (await http.post("/v1/completions", json=prompt(1))).status_code == 200
        await cluster.assert_no_leak()


async def test_a_request_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"x" * 1000
        yield b'"}'

    async with running(tmp_path, num_workers=1, max_message_bytes=10_000) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as http:
            for content in (b'{"prompt": "' + b"x" * 20_000 + b'"}', pieces()):
                headers = {"content-type": "application/json"}
                refused = await http.post("/v1/completions", content=content, headers=headers)
                assert refused.status_code == 413, refused.text
                assert refused.json()["error"]["code"] == "request_too_large"
            assert (await http.post("/v1/completions", json=prompt(1))).status_code == 200
        async with cluster.channel() as channel:
            request = pb.GenerateRequest(tokens=pb.TokenIds(ids=[200] * 20_000))
            try:
                await session_pb2_grpc.SessionServiceStub(channel).Generate(request).read()
                raise AssertionError("it was taken")
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_compressed_message_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """Zeros shrink to a thousandth: a message within the limit would fill the memory."""
    async with (
        running(tmp_path, num_workers=1) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_targets[0], compression=grpc.Compression.Gzip) as channel,
    ):
        call = session_pb2_grpc.SessionServiceStub(channel).Generate(pb.GenerateRequest(text="x" * 20_000))
        with pytest.raises(grpc.aio.AioRpcError, match="'gzip' is disabled"):
            await call.read()


async def test_a_client_that_does_not_read_holds_no_place_past_the_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running(tmp_path, num_workers=1, num_routers=2, turn_deadline_s=2.0) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_targets[0], options=SMALL_WINDOW) as channel,
        cluster.channel(1) as other,
    ):
        stub, second = (session_pb2_grpc.SessionServiceStub(c) for c in (channel, other))
        sampling = pb.Sampling(max_tokens=900, ignore_eos=True, seed=1, temperature=0.7, logprobs=20)
        # More than flow control lets through unread.
        call = stub.Generate(pb.GenerateRequest(session_id="s", text="Return the", sampling=sampling, request_id="t"))
        seen = list((await call.read()).tokens)
        await until(lambda: not cluster.router.core.live, 15, "the place to be given back")
        assert "its client does not read" in caplog.text
        await until(lambda: not cluster.workers["w0"]._leader.scheduler.turns, 5, "the engine to hear of it")
        # What its client has seen is not lost: the turn can be resumed, here or elsewhere.
        request = pb.GenerateRequest(session_id="s", request_id="t", resume_from=len(seen))
        async for answer in second.Generate(request, timeout=30):
            assert answer.index == len(seen)
            seen += answer.tokens
            if len(seen) > 100:
                break
        assert len(seen) > 100
        call.cancel()


async def test_a_long_text_does_not_block_the_event_loop(tmp_path: Path) -> None:
    """It is tokenized beside what else runs; one that no tokens could make fit is not tokenized at all."""
    text = "A session stays with the worker that has its KV. " * 110
    async with running(tmp_path, num_workers=1) as cluster:
        codec, gate, told = cluster.router.core.codec, threading.Event(), []
        encode = codec.encode

        def held_up(text: str, *, special: bool = True) -> list[int]:
            told.append(len(text))
            assert len(text) < 4096 or gate.wait(10), "nothing else could run meanwhile"
            return encode(text, special=special)

        codec.encode = held_up  # type: ignore[method-assign]
        async with httpx.AsyncClient(base_url=cluster.url, timeout=30) as http:
            first = {"prompt": text, "max_tokens": 1}
            long = asyncio.create_task(http.post("/v1/completions", json=first, headers={"X-Session-ID": "s"}))
            await until(lambda: len(text) in told, 10, "the long one to come")
            assert (await http.post("/v1/completions", json=prompt(1))).status_code == 200
            gate.set()
            answer = (await long).json()
            # The session's next turn: its text is known, and decided beside too.
            more = first | {"prompt": text + answer["choices"][0]["text"] + text[:100]}
            usage = (await http.post("/v1/completions", json=more, headers={"X-Session-ID": "s"})).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= answer["usage"]["prompt_tokens"]
            told.clear()
            for path, body in (
                ("/v1/completions", {"prompt": text * 1000}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text * 1000}]}),
                ("/generate", {"text": text * 1000}),
                ("/v1/responses", {"input": text * 1000}),
            ):
                refused = await http.post(path, json=body)
                assert refused.status_code == 400, path
                assert refused.json()["error"]["code"] == "context_length_exceeded", path
        assert not told
        await cluster.assert_no_leak()
