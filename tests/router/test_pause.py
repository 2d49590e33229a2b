"""Pausing generation on every worker, as SGLang's clients do around an update of weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness import Harness, running
from tests.waiting import until


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Harness]:
    """Its turns wait for no token longer than two seconds, but in a pause: a busy machine may stall for one."""
    async with running(tmp_path, token_timeout_s=2.0) as harness:
        yield harness
        await harness.assert_no_leak()


@pytest.fixture
async def http(cluster: Harness) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        yield client


def body(text: str, num_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"text": text, "sampling_params": sampling}


async def pause(http: httpx.AsyncClient, mode: str | None) -> None:
    answer = await http.post("/pause_generation", json={"mode": mode} if mode else None)
    assert answer.status_code == 200 and answer.json()["status"] == "ok"


def schedulers(cluster: Harness) -> list[Any]:
    return [worker._leader.scheduler for worker in cluster.workers.values()]


def num_output(cluster: Harness) -> int:
    return sum(turn.num_output for scheduler in schedulers(cluster) for turn in list(scheduler.turns.values()))


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_turn_goes_on_as_if_nothing_had_happened(
    http: httpx.AsyncClient, cluster: Harness, mode: str
) -> None:
    calm = (await http.post("/generate", json=body("Return the", 400))).json()["text"]
    await http.post("/flush_cache")
    task = asyncio.create_task(http.post("/generate", json=body("Return the", 400)))
    await until(lambda: num_output(cluster) > 3, 20, "the turn to run")
    await pause(http, mode)
    assert all(scheduler.paused for scheduler in schedulers(cluster))
    before = num_output(cluster)
    assert 3 < before < 400
    late = asyncio.create_task(http.post("/generate", json=body("A turn that comes in the pause", 4)))
    await until(lambda: sum(len(s.waiting) for s in schedulers(cluster)) >= 1, 20, "the second turn to wait")
    await asyncio.sleep(3.0)  # longer than a turn may wait for a token
    assert num_output(cluster) == before and not task.done() and not late.done()
    await http.post("/flush_cache")
    assert (await http.get("/holdfast/workers")).json()[0]["paused"]
    assert (await http.post("/continue_generation")).json()["status"] == "ok"
    assert (await task).json()["text"] == calm
    assert (await late).json()["meta_info"]["completion_tokens"] == 4


async def test_by_default_a_pause_aborts_what_runs(http: httpx.AsyncClient, cluster: Harness) -> None:
    task = asyncio.create_task(http.post("/generate", json=body("Return the", 2000)))
    await until(lambda: num_output(cluster) > 3, 20, "the turn to run")
    await pause(http, None)
    assert (await task).json()["meta_info"]["finish_reason"]["type"] == "abort"
    await http.post("/continue_generation")
    assert (await http.post("/generate", json=body("Return the", 2))).status_code == 200


async def test_an_unknown_mode_is_refused(http: httpx.AsyncClient, cluster: Harness) -> None:
    answer = await http.post("/pause_generation", json={"mode": "nap"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "mode"
    assert not any(scheduler.paused for scheduler in schedulers(cluster))
