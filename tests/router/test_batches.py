"""Files and batches, with the official client: every line is answered once, whoever dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from router.access.keys import given_key
from router.batches.store import StoredBatch
from tests.harness import Harness, running
from tests.waiting import until

MODEL = "holdfast-tiny"
CHAT = "/v1/chat/completions"


@pytest.fixture
async def client(cluster: Harness) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(number: int, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Say the number {number}"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 1.0, "seed": number} | more
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


async def uploaded(client: AsyncOpenAI, lines: Sequence[Any]) -> Any:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return await client.files.create(file=("in.jsonl", text.encode()), purpose="batch")


async def started(client: AsyncOpenAI, lines: Sequence[Any], endpoint: Any = CHAT, **more: Any) -> Any:
    file = await uploaded(client, lines)
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def ended(client: AsyncOpenAI, batch_id: str) -> Any:
    for _ in range(6000):
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        await asyncio.sleep(0.02)
    raise AssertionError(f"the batch is still {batch.status}: {batch.request_counts}")


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of an output file by custom id, each of which is there once."""
    text = (await client.files.content(file_id)).text if file_id else ""
    lines = [json.loads(line) for line in text.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


async def test_each_line_is_answered_as_its_request_alone(client: AsyncOpenAI) -> None:
    batch = await started(client, [chat(n) for n in range(40)], metadata={"a": "b"})
    assert batch.status == "validating" and batch.object == "batch" and batch.metadata == {"a": "b"}
    done = await ended(client, batch.id)
    assert done.status == "completed" and done.error_file_id is None and done.completed_at >= done.in_progress_at
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (40, 40, 0)
    answers = await lines_of(client, done.output_file_id)
    assert list(answers) == [f"line-{n}" for n in range(40)]
    alone = await client.chat.completions.create(**chat(7)["body"])
    answer = answers["line-7"]["response"]
    assert answer["status_code"] == 200 and answers["line-7"]["error"] is None
    assert answer["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    used = [a["response"]["body"]["usage"] for a in answers.values()]
    assert done.usage.output_tokens == sum(u["completion_tokens"] for u in used)
    assert done.usage.total_tokens == sum(u["total_tokens"] for u in used)
    output = await client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output" and output.status == "processed"
    assert output.bytes == len((await client.files.content(output.id)).content)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 3}),
        ("/v1/responses", {"model": MODEL, "input": "hi", "max_output_tokens": 3}),
    ],
)
async def test_the_other_endpoints(client: AsyncOpenAI, endpoint: str, body: dict[str, Any]) -> None:
    lines = [{"custom_id": "x", "method": "POST", "url": endpoint, "body": body}]
    done = await ended(client, (await started(client, lines, endpoint)).id)
    answer = (await lines_of(client, done.output_file_id))["x"]["response"]
    assert answer["status_code"] == 200 and answer["request_id"] == answer["body"]["id"]
    assert done.usage.output_tokens > 0


async def test_a_line_that_fails_is_in_the_error_file_alone(client: AsyncOpenAI) -> None:
    lines = [chat(0), chat(1, temperature=-1), chat(2, model="unknown"), chat(3)]
    done = await ended(client, (await started(client, lines)).id)
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 2)
    assert list(await lines_of(client, done.output_file_id)) == ["line-0", "line-3"]
    errors = await lines_of(client, done.error_file_id)
    assert [errors[name]["response"]["status_code"] for name in ("line-1", "line-2")] == [400, 404]
    assert errors["line-1"]["response"]["body"]["error"]["param"] == "temperature"


BAD = {
    "invalid_json_line": "{",
    "invalid_request": json.dumps(chat(1) | {"body": "text"}),
    "duplicate_custom_id": json.dumps(chat(0)),
    "invalid_method": json.dumps(chat(1) | {"method": "GET"}),
    "mismatched_endpoint": json.dumps(chat(1) | {"url": "/v1/completions"}),
    "unsupported_parameter": json.dumps(chat(1, stream=True)),
}


async def test_a_file_with_bad_lines_is_not_run_at_all(client: AsyncOpenAI) -> None:
    done = await ended(client, (await started(client, [json.dumps(chat(0)), *BAD.values()])).id)
    assert done.status == "failed" and done.failed_at and done.output_file_id is None
    assert [(error.code, error.line) for error in done.errors.data] == list(zip(BAD, range(2, 8), strict=True))
    empty = await ended(client, (await started(client, ["", " "])).id)
    assert empty.status == "failed" and empty.errors.data[0].code == "empty_file"


async def test_a_batch_whose_input_was_deleted_fails(client: AsyncOpenAI) -> None:
    file = await uploaded(client, [chat(0)])
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    await client.files.delete(file.id)
    done = await ended(client, batch.id)
    assert done.status == "failed" and done.errors.data[0].code == "input_file_deleted"


async def test_a_cancelled_batch_keeps_what_was_answered(client: AsyncOpenAI) -> None:
    batch = await started(client, [chat(n, 150, ignore_eos=True) for n in range(80)])
    while (await client.batches.retrieve(batch.id)).request_counts.completed < 5:
        await asyncio.sleep(0.01)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    done = await ended(client, batch.id)
    assert done.status == "cancelled" and done.cancelled_at and done.cancelling_at
    answers, errors = await lines_of(client, done.output_file_id), await lines_of(client, done.error_file_id)
    assert 5 <= len(answers) == done.request_counts.completed < 80
    assert {**answers, **errors}.keys() == {f"line-{n}" for n in range(80)} and len(answers) + len(errors) == 80
    assert {error["error"]["code"] for error in errors.values()} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        await client.batches.cancel(batch.id)


async def test_a_batch_past_its_window_expires(client: AsyncOpenAI, cluster: Harness) -> None:
    core = cluster.router.core
    file = await core.files.get((await uploaded(client, [chat(n, 500, ignore_eos=True) for n in range(60)])).id, "")
    batch = await core.batches.create("", MODEL, CHAT, file, "1s", 2.0)
    done = await ended(client, batch.id)
    errors = await lines_of(client, done.error_file_id)
    assert (
        done.status == "expired"
        and done.expired_at
        and "batch_expired" in {error["error"]["code"] for error in errors.values()}
    )


async def test_files_are_listed_read_and_deleted(client: AsyncOpenAI) -> None:
    text = ("ä" * 99 + "\n") * 4000  # several pieces
    first = await client.files.create(file=("a.jsonl", text.encode()), purpose="batch")
    second = await client.files.create(
        file=("b.jsonl", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
    )
    assert second.expires_at == second.created_at + 7200 and second.bytes == 1
    assert (await client.files.content(first.id)).text == text and first.bytes == len(text.encode())
    assert {file.id async for file in client.files.list(purpose="batch", limit=1)} == {first.id, second.id}
    assert [file.id async for file in client.files.list(purpose="batch_output")] == []
    assert (await client.files.delete(first.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(first.id)
    assert [file.id async for file in client.files.list()] == [second.id]


async def test_an_expired_file_is_deleted_with_all_its_pieces(client: AsyncOpenAI, cluster: Harness) -> None:
    journal, files = cluster.router.core.journal, cluster.router.core.files
    gone, kept = await uploaded(client, ["x" * 600_000]), await uploaded(client, ["y"])
    stored = await files.get(gone.id, "")
    await files.delete_expired(stored.expires_at - 1)
    assert len(await files.list("")) == 2
    await files.delete(kept.id, "")
    await files.delete_expired(stored.expires_at)
    assert await files.list("") == [] and await journal.list_objects("", "file-piece/") == []
    assert await journal.list_objects("batches", "expiring/") == []


async def test_the_journal_keeps_nothing_of_a_batch_but_its_files(client: AsyncOpenAI, cluster: Harness) -> None:
    journal = cluster.router.core.journal
    batch = await started(client, [chat(n) for n in range(3)])
    await ended(client, batch.id)

    async def left() -> list[str]:
        prefixes = ("batch-answer/", "batch-cancel/")
        found = [key for prefix in prefixes for key, _ in await journal.list_objects("", prefix)]
        return found + [key for key, _ in await journal.list_objects("batches", "open/")]

    while await left():
        await asyncio.sleep(0.01)
    assert await journal.list_sessions("batches") == [] and await journal.list_sessions("") == []
    assert [batch.id for batch in (await client.batches.list()).data] == [batch.id]


async def test_a_batch_outlives_its_router_and_a_worker(two_routers: Harness) -> None:
    """The router that runs it falls silent, then a worker goes; the other router ends it, with the same answers."""
    urls = list(two_routers.urls)
    async with AsyncOpenAI(base_url=f"{urls[1]}/v1", api_key="none", max_retries=0, timeout=60) as client:
        lines = [chat(n, 60, ignore_eos=True) for n in range(60)]
        two_routers.routers[1].core.batches.open = nothing  # type: ignore[method-assign]  # the first one claims it
        batch = await started(client, lines)
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 10:
            await asyncio.sleep(0.01)
        dead = two_routers.lose_router()
        del two_routers.routers[0].core.batches.open
        await two_routers.lose_worker("w0")
        await two_routers.announce()
        done = await ended(client, batch.id)
        assert done.status == "completed" and done.request_counts.completed == 60
        answers = await lines_of(client, done.output_file_id)
        assert answers.keys() == {f"line-{n}" for n in range(60)}
        for number in (0, 30, 59):
            alone = await client.chat.completions.create(**chat(number, 60)["body"], extra_body={"ignore_eos": True})
            message = answers[f"line-{number}"]["response"]["body"]["choices"][0]["message"]
            assert message["content"] == alone.choices[0].message.content
    await dead._batches.stop()


async def nothing() -> dict[str, str]:
    return {}


async def test_tenants_do_not_see_each_other_s_files_and_batches(tmp_path: Path) -> None:
    async with running(tmp_path, num_workers=1, api_keys=(given_key("one"), given_key("two"))) as cluster:
        url = f"{cluster.url}/v1"
        async with (
            AsyncOpenAI(base_url=url, api_key="one", timeout=60) as one,
            AsyncOpenAI(base_url=url, api_key="two", timeout=60) as two,
        ):
            batch = await started(one, [chat(0)])
            done = await ended(one, batch.id)
            assert (await lines_of(one, done.output_file_id))["line-0"]["response"]["status_code"] == 200
            assert (await two.files.list()).data == [] and (await two.batches.list()).data == []
            for call in (two.files.content(done.output_file_id), two.batches.retrieve(batch.id)):
                with pytest.raises(openai.NotFoundError):
                    await call
            with pytest.raises(openai.NotFoundError):
                await two.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
            async with httpx.AsyncClient() as http:
                assert (await http.get(f"{url}/files", headers={"holdfast.tenant": "x"})).status_code == 401


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "99999d"}, "completion_window"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ],
    ids=str,
)
async def test_a_bad_batch_is_refused(client: AsyncOpenAI, change: dict[str, Any], param: str) -> None:
    file = await uploaded(client, [chat(0)])
    given: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | change
    with pytest.raises(openai.BadRequestError) as refused:
        await client.batches.create(**given)
    assert refused.value.param == param


async def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running(tmp_path, num_workers=1, max_file_bytes=200_000) as cluster,
        AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        for size in (200_001, 400_000):
            with pytest.raises(openai.APIStatusError) as refused:
                await client.files.create(file=("big", b"x" * size), purpose="batch")
            assert refused.value.status_code == 413
        with pytest.raises(openai.BadRequestError) as unknown:
            await client.files.create(file=("x", b"x"), purpose="fine-tune")
        assert unknown.value.param == "purpose"
        file = await uploaded(client, [chat(0)])
        monkeypatch.setattr("router.batches.files.MAX_FILES_PER_TENANT", 1)
        monkeypatch.setattr("router.batches.store.MAX_OPEN_BATCHES", 0)
        with pytest.raises(openai.RateLimitError, match="delete some"):
            await uploaded(client, [chat(0)])
        with pytest.raises(openai.RateLimitError, match="have not ended"):
            await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


async def test_an_interactive_turn_does_not_wait_for_a_batch(client: AsyncOpenAI, cluster: Harness) -> None:
    """Every worker's batch is full of background turns: some of them make room."""
    batch = await started(client, [chat(n, 300, ignore_eos=True) for n in range(64)])
    schedulers = [worker._leader.scheduler for worker in cluster.workers.values()]
    await until(lambda: all(len(s.running) == 8 for s in schedulers), 20, "full workers")
    answer = await client.chat.completions.create(**chat(1)["body"])
    assert answer.choices and sum(s.num_retracted for s in schedulers) >= 1
    assert all(turn.params.background for s in schedulers for turn in list(s.turns.values()))
    await client.batches.cancel(batch.id)
    assert (await ended(client, batch.id)).status == "cancelled"


def test_a_batch_of_an_earlier_version_can_be_read() -> None:
    """Unknown fields of a record are ignored, and new ones have defaults."""
    known = {"id": "b", "endpoint": CHAT, "model": "m", "input_file_id": "f", "completion_window": "24h"}
    batch = StoredBatch.model_validate(known | {"created_at": 1, "expires_at": 2, "later": 3})
    assert batch.status == "validating"
