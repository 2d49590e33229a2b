"""Two routers on Ray over one journal: one is killed, and its sessions continue at the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIError, AsyncOpenAI

from tests.cluster.served import HTTP, START_DEADLINE_S, Served, serving, stream
from tests.waiting import until

LONG = 2000
"""Tokens of a turn that still runs when a client, on a busy machine, has read its first ones and kills a process."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("routers")
    with serving(folder, "--routers", "2", "--workers", "1", "--log-format", "json") as cluster:
        yield cluster


def router_of(served: Served, url: str) -> psutil.Process:
    """The process that listens there."""
    port = int(url.rsplit(":", 1)[1])
    for process in psutil.Process(served.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections()):
                return process
    raise AssertionError(f"nobody listens at {url}")


def healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return HTTP.get(f"{url}/health").status_code == 200
    return False


async def test_a_router_dies_and_its_sessions_continue_at_the_other(served: Served) -> None:
    first, second = served.urls
    async with (
        AsyncOpenAI(base_url=f"{first}/v1", api_key="none", max_retries=0) as one,
        AsyncOpenAI(base_url=f"{second}/v1", api_key="none", max_retries=0) as two,
    ):
        whole = await stream(one, "s", prompt="Return the", num_tokens=12)
        victim = router_of(served, first)
        with pytest.raises((APIError, httpx.HTTPError)):
            kill = partial(os.kill, victim.pid, signal.SIGKILL)
            await stream(one, "s", 5, kill, prompt="Return the" + whole, num_tokens=LONG)
        # Its open turn is rolled back when its lease has lapsed; the session is as after its last good turn.
        answer = await two.completions.create(
            model="holdfast-tiny",
            prompt="Return the" + whole,
            max_tokens=4,
            extra_headers={"X-Session-ID": "s"},
            timeout=30,
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1
        # Another router serves where clients know the dead one, and can have the session back.
        await until(lambda: healthy(first), START_DEADLINE_S, "the router to come back")
        assert router_of(served, first).pid != victim.pid
        assert await stream(one, "other", prompt="Return the", num_tokens=12) == whole
        assert len(await stream(one, "s", num_tokens=12)) > 0
    assert all(report["ok"] for report in served.ask("audit"))


async def test_a_stopped_router_blocks_nothing_and_is_replaced(served: Served) -> None:
    first, second = served.urls
    async with AsyncOpenAI(base_url=f"{first}/v1", api_key="none", max_retries=0) as client:
        text = await stream(client, "before", prompt="Return the", num_tokens=12)
        stopped = router_of(served, second)
        os.kill(stopped.pid, signal.SIGSTOP)
        # The only worker dies meanwhile: its next incarnation must not wait for that router to hear of it.
        os.kill(int(served.workers()[0]["pid"]), signal.SIGKILL)
        assert await stream(client, "after", prompt="Return the", num_tokens=12) == text
        await until(lambda: not stopped.is_running(), 20, "the stopped router to be ended")
        await until(lambda: healthy(second), START_DEADLINE_S, "another to serve in its place")
    async with AsyncOpenAI(base_url=f"{second}/v1", api_key="none", max_retries=0) as client:
        assert await stream(client, "at the new one", prompt="Return the", num_tokens=12) == text


async def test_a_turns_log_records_name_it(served: Served) -> None:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        kill = partial(os.kill, int(served.workers()[0]["pid"]), signal.SIGKILL)
        said = await stream(client, "logged", 5, kill, prompt="Return the xyzzy", num_tokens=LONG)

    def records() -> list[dict[str, Any]]:
        lines = [line[line.find("{") :] for line in Path(served.log.name).read_text().splitlines() if "{" in line]
        return [json.loads(line) for line in lines if '"message"' in line]

    def failed_over() -> list[dict[str, Any]]:
        return [record for record in records() if record.get("session_id") == "logged" and record.get("turn_id")]

    await until(lambda: failed_over() != [], 10, "the record of its failover")
    (record,) = failed_over()
    assert record["levelname"] == "WARNING" and record["name"] == "holdfast.router"
    assert f"turn {record['turn_id']} of session logged failed over" in record["message"]
    log = served.log_tail(10_000_000)
    assert "xyzzy" not in log and said[-20:] not in log, "what clients and models say is in no record"
