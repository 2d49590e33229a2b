"""HTTP as clients and middlemen speak it, over real sockets: what is right is answered, and nothing else hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from router.connections import MAX_HEADER_BYTES
from tests.harness import Harness, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
TIMEOUT_S = 1.0
BODY = json.dumps({"model": "holdfast-tiny", "prompt": "Return the", "max_tokens": 2, "ignore_eos": True}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
PLAIN = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
HEALTH = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
LONG = b"x" * (MAX_HEADER_BYTES + 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    path: Path = tmp_path_factory.mktemp("connections")
    async with running(path, num_workers=1, client_timeout_s=TIMEOUT_S) as cluster:
        yield cluster


async def exchange(cluster: Harness, *pieces: bytes) -> bytes:
    """Send the pieces, one after another; return all that the server sends before it closes the connection."""
    address = httpx.URL(cluster.urls[0])
    reader, writer = await asyncio.open_connection(address.host, address.port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.05)
    async with asyncio.timeout(20):
        answer = await reader.read(-1)
    writer.close()
    return answer


def chunked(body: bytes, trailers: bytes = b"") -> bytes:
    half = len(body) // 2
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:half], body[half:]))
    return POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
"""What Java's HttpClient sends by default: a server without HTTP/2 answers as if it were not there (RFC 9110, 7.8)."""


@pytest.mark.parametrize(
    ("pieces", "num_answers"),
    [
        ([PLAIN, PLAIN, HEALTH], 3),
        ([PLAIN + PLAIN + HEALTH], 3),
        ([PLAIN + PLAIN[:40], PLAIN[40:] + HEALTH], 3),
        ([chunked(BODY), HEALTH], 2),
        ([chunked(BODY, b"X-Sum: 1\r\n"), HEALTH], 2),
        ([POST + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY, PLAIN, HEALTH], 3),
        ([POST + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(BODY), BODY, HEALTH], 2),
        ([b"GET /health HTTP/1.1\r\nHost: h\r\n" + UPGRADE + b"\r\n", PLAIN, HEALTH], 3),
        ([(b"GET /health HTTP/1.1\r\nHost: h\r\n" + UPGRADE + b"\r\n") * 1100 + HEALTH], 1101),
        ([POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY), BODY, HEALTH], 2),
        ([b"GET /health HTTP/1.0\r\n\r\n"], 1),
    ],
    ids=[
        "one by one", "at once", "in pieces", "chunked", "trailers", "upgrade", "upgrade, then the body",
        "upgrade without a body", "many upgrades", "100-continue", "HTTP/1.0",
    ],
)  # fmt: skip
async def test_requests_of_one_connection_are_answered(cluster: Harness, pieces: list[bytes], num_answers: int) -> None:
    answer = await exchange(cluster, *pieces)
    assert answer.count(b"HTTP/1.1 200 OK") == num_answers, answer


@pytest.mark.parametrize(
    "pieces",
    [
        [b"not HTTP at all\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: h\r\nX-Long: " + LONG],
        [b"GET /health HTTP/1.1\r\nHost: h\r\nX-Long: " + LONG + b"\r\n\r\n"],
        [b"GET /health HTTP/1.1\r\nHost: h\r\n", *[b"X-%d: %s\r\n" % (i, b"x" * 20_000) for i in range(5)]],
        [b"GET /health?" + LONG + b" HTTP/1.1\r\nHost: h\r\n\r\n"],
        [POST + b"Content-Length: 4x\r\n\r\n"],
        [POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"],
    ],
    ids=["garbage", "endless header", "long header", "many headers", "long path", "no length", "two lengths"],
)
async def test_what_is_not_a_request_is_refused(cluster: Harness, pieces: list[bytes]) -> None:
    assert (await exchange(cluster, *pieces)).startswith(b"HTTP/1.1 400 ")
    assert b"200 OK" in await exchange(cluster, HEALTH)


async def test_trailers_without_end_are_cut_off(cluster: Harness) -> None:
    answer = await exchange(cluster, chunked(BODY, b"X-Sum: " + LONG), LONG)
    assert b"200 OK" not in answer
    assert b"200 OK" in await exchange(cluster, HEALTH)


async def test_the_rest_of_a_request_may_come_long_after_the_answer_to_the_one_before(cluster: Harness) -> None:
    """A deadline for the second request must not cut off the first one's answer."""
    data = json.dumps(json.loads(BODY) | {"max_tokens": 3500, "logprobs": 5, "stream": True}).encode()
    first = POST + b"Content-Length: %d\r\n\r\n" % len(data) + data
    answer = await exchange(cluster, first + HEALTH[:20])
    assert answer.count(b"HTTP/1.1") == 2
    assert b"HTTP/1.1 408 " in answer[answer.index(b"[DONE]") :]
