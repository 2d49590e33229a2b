"""Batches over one journal whose routers die, or fall silent and come back: each line is answered once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.batches import run, runner
from router.batches.files import Files
from router.batches.run import Answer
from router.batches.runner import BatchRunner
from router.batches.store import ENDED, Batches
from router.journal.sqlite import SqliteJournal
from tests.router.journal.records import LEASE_S

NUM_LINES = 300
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
PATH = "/v1/completions"


@dataclass
class Owner:
    """A router as far as batches know it. Its answers say who gave them."""

    journal: SqliteJournal
    runner: BatchRunner

    @classmethod
    async def start(cls, path: Path, name: str, rng: random.Random) -> Owner:
        journal = SqliteJournal(path, "process", LEASE_S)
        await journal.start()
        files, batches = Files(journal), Batches(journal)

        async def call(tenant: str, path: str, body: dict[str, Any]) -> Answer:
            await asyncio.sleep(rng.choice((0.05, 0.2, 0.5)))
            status = rng.choice((200, 200, 200, 429)) if body["prompt"] % 7 else 400
            return Answer(status, {"id": name, "said": body["prompt"], "usage": USAGE})

        owner = cls(journal, BatchRunner(journal, files, batches, call))
        owner.runner.start()
        return owner

    async def fall_silent(self) -> None:
        """Its lease lapses, while it runs on: what it still writes must change nothing."""
        assert self.journal._beats is not None
        self.journal._beats.cancel()

    async def die(self) -> None:
        """As ``kill -9``: it neither writes nor gives up anything more."""
        await self.fall_silent()
        tasks = [self.runner._task, *self.runner._runs.values()]
        self.runner._batches.give_up = _nothing  # type: ignore[method-assign]
        for task in tasks:
            assert task is not None
            task.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


async def _nothing(batch_id: str) -> None:
    pass


async def _content(lines: list[dict[str, Any]]) -> AsyncIterator[bytes]:
    yield b"\n".join(json.dumps(line).encode() for line in lines)


@pytest.mark.parametrize("seed", range(4))
async def test_each_line_is_answered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    for module, name, value in ((runner, "POLL_S", 0.02), (run, "POLL_S", 0.02), (run, "RETRY_S", 0.01)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(run, "GROUP", 50)
    rng = random.Random(seed)
    owners = [await Owner.start(tmp_path / "j.db", f"router-{i}", rng) for i in range(2)]
    journal = SqliteJournal(tmp_path / "j.db", "process", LEASE_S)
    await journal.start()
    files, batches = Files(journal), Batches(journal)
    lines = [{"custom_id": f"l{n}", "method": "POST", "url": PATH, "body": {"prompt": n}} for n in range(NUM_LINES)]
    made = []
    for _ in range(2):
        file = await files.create("t", "in", "batch", _content(lines))
        made.append((await batches.create("t", "m", PATH, file, "24h", 1000.0)).id)
    ends: dict[str, bytes] = {}
    for round_ in range(2000):
        await asyncio.sleep(0.02)
        if round_ % 12 == 11 and len(owners) < 12:
            living = [owner for owner in owners if owner.journal._beats and not owner.journal._beats.done()]
            await rng.choice((Owner.die, Owner.fall_silent))(rng.choice(living))
            owners.append(await Owner.start(tmp_path / "j.db", f"router-{len(owners)}", rng))
        for batch_id in made:
            batch = await batches.get(batch_id, "t")
            if batch.status in ENDED and batch_id not in ends:
                ends[batch_id] = batch.model_dump_json().encode()
        if len(ends) == len(made):
            break
    await asyncio.sleep(2 * LEASE_S)  # for those who have not noticed
    num_owners = []
    for batch_id in made:
        batch = await batches.get(batch_id, "t")
        assert batch.model_dump_json().encode() == ends[batch_id], "the end is final"
        assert batch.status == "completed" and batch.request_counts.total == NUM_LINES
        names, said = set(), []
        for file_id, failed in ((batch.output_file_id, False), (batch.error_file_id, True)):
            assert file_id is not None
            text = b"".join([piece async for piece in files.content(await files.get(file_id, "t"), "t")])
            answers = [json.loads(line) for line in text.splitlines()]
            assert all((answer["response"]["body"]["said"] % 7 == 0) is failed for answer in answers)
            said += [answer["response"]["body"]["said"] for answer in answers]
            names |= {answer["response"]["body"]["id"] for answer in answers}
            assert [f"l{n}" for n in said[-len(answers) :]] == [answer["custom_id"] for answer in answers]
        assert sorted(said) == list(range(NUM_LINES))
        num_owners.append(len(names))
        count = batch.request_counts.completed
        assert batch.usage == {
            "input_tokens": 5 * count,
            "output_tokens": 7 * count,
            "total_tokens": 12 * count,
            "input_tokens_details": {"cached_tokens": 3 * count},
            "output_tokens_details": {"reasoning_tokens": 2 * count},
        }
    assert max(num_owners) > 1, "it changed hands"
    assert await journal.list_objects("t", "batch-answer/") == [] and await batches.open() == {}
    for owner in owners:
        await owner.runner.stop()
        await owner.journal.close()
    await journal.close()
