"""Workers of two ranks on Ray: any rank may die or hang at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest
from openai import AsyncOpenAI

from tests.cluster.served import Served, serving, stream
from tests.waiting import until

LONG_PROMPT = "Return the list of all items. " * 300
NUM_TOKENS = 60
MAX_LATE = 20
SIGNALS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
IN_LONG_RUNS = {
    ("prefill", "kill -9", 1),
    ("prefill", "SIGSTOP", 0),
    ("decode", "SIGSTOP", 1),
    ("release", "kill -9", 0),
}
"""Cases that differ from another in one respect only."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("ranks"), "--tp", "2", "--chunked-prefill-size", "128") as cluster:
        yield cluster


@pytest.fixture
async def client(served: Served):
    await served.whole()
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def disturbances(moment: str) -> pytest.MarkDecorator:
    """Every signal to every rank; some of them in long runs alone."""
    cases = [(how, rank) for how in SIGNALS for rank in (0, 1)]
    return pytest.mark.parametrize(("how", "rank", "moment"), [(*case, moment) for case in cases])


@pytest.fixture(autouse=True)
def _skip(request: pytest.FixtureRequest, long: bool) -> None:
    callspec = getattr(request.node, "callspec", None)
    case = tuple(callspec.params[name] for name in ("moment", "how", "rank")) if callspec is not None else ()
    if case in IN_LONG_RUNS and not long:
        pytest.skip("make test-long")


class Group:
    """The processes of one worker's ranks."""

    def __init__(self, worker: dict) -> None:
        self.worker = worker
        self.processes = [psutil.Process(int(rank["pid"])) for rank in worker["ranks"]]
        assert len(self.processes) == 2

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    async def gone(self) -> None:
        await until(lambda: not any(p.is_running() for p in self.processes), 30, "every rank of the group to be gone")


async def assert_whole_again(served: Served, group: Group) -> None:
    await group.gone()
    await served.whole()
    reports = served.ask("audit")
    assert all(report["ok"] and len(report["ranks"]) == 2 for report in reports)
    assert group.worker["incarnation"] not in {report["incarnation"] for report in reports}


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What an undisturbed turn says, by prompt."""
    return {}


async def calm(client: AsyncOpenAI, expected: dict[str, str], prompt: str) -> str:
    if prompt not in expected:
        expected[prompt] = await stream(client, f"calm-{len(expected)}", prompt=prompt, num_tokens=NUM_TOKENS)
    return expected[prompt]


@disturbances("decode")
async def test_in_decode(
    served: Served, client: AsyncOpenAI, expected: dict[str, str], how: str, rank: int, moment: str
) -> None:
    calm_text = await calm(client, expected, "Return the")
    session, groups = f"decode-{how}-{rank}", []

    def disturb() -> None:
        groups.append(Group(served.worker_of(session)))
        groups[0].signal(rank, SIGNALS[how])

    assert await stream(client, session, 10, disturb, prompt="Return the", num_tokens=NUM_TOKENS) == calm_text
    await assert_whole_again(served, groups[0])


@disturbances("prefill")
async def test_in_prefill(served: Served, client: AsyncOpenAI, how: str, rank: int, moment: str) -> None:
    for attempt in range(MAX_LATE):
        prompt = f"{how} {rank} {attempt} {LONG_PROMPT}"  # another each time: nothing of it is cached
        session = f"prefill-{how}-{rank}-{attempt}"
        turn = asyncio.create_task(stream(client, session, prompt=prompt, num_tokens=8))
        if worker := await running_worker(served, turn):
            break
    else:
        raise AssertionError(f"{MAX_LATE} turns ended before any was seen")
    group = Group(worker)
    group.signal(rank, SIGNALS[how])
    text = await turn
    await assert_whole_again(served, group)
    assert await stream(client, f"again-{session}", prompt=prompt, num_tokens=8) == text


async def running_worker(served: Served, turn: asyncio.Task[str]) -> dict | None:
    """The worker that runs a turn; None when the turn has ended before it was seen, as on a busy machine."""
    while not turn.done():
        for worker in await asyncio.to_thread(served.workers):
            if worker["running"]:
                return worker
    return None


@disturbances("release")
async def test_in_a_release(served: Served, client: AsyncOpenAI, how: str, rank: int, moment: str) -> None:
    session = f"release-{how}-{rank}"
    await stream(client, session, prompt="Return", num_tokens=4)
    group = Group(served.worker_of(session))
    # Stopped first, so that the release is surely under way when the rank dies.
    group.signal(rank, signal.SIGSTOP)
    async with httpx.AsyncClient(base_url=served.url, timeout=12) as http:
        release = asyncio.create_task(http.delete(f"/holdfast/sessions/{session}"))
        await asyncio.wait([release], timeout=0.2)
        assert not release.done(), "one rank alone does not make it a release"
        if how == "kill -9":
            group.signal(rank, signal.SIGKILL)
        answer = await release
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"session_id": session, "pages_freed": 0}, "its pages died with the worker"
        assert session not in {s["session_id"] for s in (await http.get("/holdfast/sessions")).json()}
    await assert_whole_again(served, group)


async def test_a_stopped_rank_ends_when_it_resumes(served: Served, client: AsyncOpenAI) -> None:
    await stream(client, "woken", prompt="Return", num_tokens=4)
    group = Group(served.worker_of("woken"))
    group.signal(1, signal.SIGSTOP)
    await until(lambda: not group.processes[0].is_running(), 20, "its leader to end")
    with contextlib.suppress(ProcessLookupError):  # the supervisor may be faster
        group.signal(1, signal.SIGCONT)
    await assert_whole_again(served, group)


async def test_status_shows_every_rank(served: Served, client: AsyncOpenAI) -> None:
    for worker in served.ask("status"):
        ranks = worker["ranks"]
        assert [rank["rank"] for rank in ranks] == [0, 1]
        assert len({rank["pid"] for rank in ranks}) == 2 and all(rank["node"] for rank in ranks)
        assert all(rank["lag"] == "0" and rank["log_index"] == ranks[0]["log_index"] for rank in ranks)
