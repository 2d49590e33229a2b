"""One batch, run by the router that claimed it: validate, answer line by line, write the output files.

Each line's answer is in the journal before the next counts. A router that takes the batch over begins where
the answers end. All writes are fenced by the claim: a former owner that still runs changes nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from holdfast.errors import ResponseNotFound
from router.batches.files import Files, FileWriter
from router.batches.lines import Line, LineError, parse_lines
from router.batches.store import ENDED, Batches, StoredBatch
from router.journal.interface import Fence, Journal

LINES_AT_ONCE = 32
"""Of one batch: enough to fill a worker's steps, few enough to leave room in its queue."""
GROUP = 1000
"""Answers that are read from the journal at once."""
POLL_S = 0.5
"""How often a batch looks whether it was cancelled, or has expired."""
RETRY_S = 1.0
LATER = (429, 503, 504)
"""Statuses of a cluster that is full, or between two workers: the line is tried again."""
REASONS = {
    "expired": ("batch_expired", "this request could not be executed before the completion window expired"),
    "cancelled": ("batch_cancelled", "this request was not executed before the batch was cancelled"),
}


class Answer(NamedTuple):
    """Of an endpoint."""

    status: int
    body: dict[str, Any]


Call = Callable[[str, str, dict[str, Any]], Awaitable[Answer]]
"""Calls an endpoint: (tenant, path, body)."""


class BatchRun:
    """Runs one claimed batch to its end."""

    def __init__(
        self,
        journal: Journal,
        files: Files,
        batches: Batches,
        call: Call,
        tenant: str,
        batch: StoredBatch,
        fence: Fence,
    ) -> None:
        self._journal = journal
        self._files = files
        self._batches = batches
        self._call = call
        self._tenant = tenant
        self._batch = batch
        self._fence = fence

    async def run(self) -> None:
        """Until the batch has ended. Raises StaleEpoch if another router has taken it, JournalUnavailable."""
        batch = self._batch
        if batch.status not in ENDED:
            lines, errors = await self._read_lines()
            if errors:
                listed = [{"code": e.code, "message": e.message, "line": e.line, "param": e.param} for e in errors]
                await self._fail(listed)
            else:
                await self._answer(lines)
        await self._clean_up()

    async def _read_lines(self) -> tuple[list[Line], list[LineError]]:
        try:
            file = await self._files.get(self._batch.input_file_id, self._tenant)
        except ResponseNotFound:
            return [], [LineError("input_file_deleted", f"the input file {self._batch.input_file_id} was deleted")]
        content = b"".join([piece async for piece in self._files.content(file, self._tenant)])
        return await asyncio.to_thread(parse_lines, content, self._batch.endpoint)

    async def fail(self, code: str, message: str) -> None:
        """End the batch without output."""
        await self._fail([{"code": code, "message": message, "line": None, "param": None}])
        await self._clean_up()

    async def _fail(self, errors: list[dict[str, Any]]) -> None:
        self._batch.errors = {"object": "list", "data": errors}
        self._batch.enter("failed")
        await self._put()

    async def _answer(self, lines: list[Line]) -> None:
        done = await self._count_answers(len(lines))
        if self._batch.status == "validating":
            self._batch.enter("in_progress")
        await self._put()
        end = await self._run_lines(lines, deque(n for n in range(len(lines)) if n not in done))
        await self._finalize(lines, end)

    async def _run_lines(self, lines: list[Line], left: deque[int]) -> str:
        """Answer the lines that are left. Returns how the batch ends."""
        tasks: set[asyncio.Task[None]] = set()
        try:
            while left or tasks:
                end = await self._early_end()
                if end:
                    return end
                while left and len(tasks) < LINES_AT_ONCE:
                    number = left.popleft()
                    tasks.add(asyncio.create_task(self._run_line(number, lines[number])))
                ended, tasks = await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.gather(*ended)
            return "completed"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _early_end(self) -> str:
        if time.time() >= self._batch.expires_at:
            return "expired"
        cancelled = await self._batches.cancelling_at(self._batch.id, self._tenant)
        self._batch.cancelling_at = cancelled
        return "" if cancelled is None else "cancelled"

    async def _run_line(self, number: int, line: Line) -> None:
        body = line.body | {"service_tier": "flex"}
        answer = await self._call(self._tenant, self._batch.endpoint, body)
        while answer.status in LATER:
            await asyncio.sleep(RETRY_S)
            answer = await self._call(self._tenant, self._batch.endpoint, body)
        self._count(answer.status, answer.body)
        response = {"status_code": answer.status, "request_id": answer.body.get("id") or "", "body": answer.body}
        shown = self._shown(number, line, response, None)
        stored = json.dumps({"status": answer.status, "line": shown}).encode()
        await self._put({_answer_key(self._batch.id, number): stored})

    def _shown(self, number: int, line: Line, response: dict[str, Any] | None, error: Any) -> dict[str, Any]:
        name = f"batch_req_{self._batch.id.removeprefix('batch_')}_{number}"
        return {"id": name, "custom_id": line.custom_id, "response": response, "error": error}

    def _count(self, status: int, body: dict[str, Any]) -> None:
        if status >= 400:
            self._batch.request_counts.failed += 1
            return
        self._batch.request_counts.completed += 1
        used, total = body.get("usage") or {}, self._batch.usage or _NO_USAGE
        inputs, outputs = total["input_tokens_details"], total["output_tokens_details"]
        cached = _detail(used, "cached_tokens", "prompt_tokens_details", "input_tokens_details")
        reasoning = _detail(used, "reasoning_tokens", "completion_tokens_details", "output_tokens_details")
        self._batch.usage = {
            "input_tokens": total["input_tokens"] + _tokens(used, "prompt_tokens", "input_tokens"),
            "output_tokens": total["output_tokens"] + _tokens(used, "completion_tokens", "output_tokens"),
            "total_tokens": total["total_tokens"] + _tokens(used, "total_tokens"),
            "input_tokens_details": {"cached_tokens": inputs["cached_tokens"] + cached},
            "output_tokens_details": {"reasoning_tokens": outputs["reasoning_tokens"] + reasoning},
        }

    async def _count_answers(self, num_lines: int) -> set[int]:
        """Count anew what the journal has: a former owner's last counts may be missing. Returns the lines' numbers."""
        self._batch.request_counts.total = num_lines
        self._batch.request_counts.completed = self._batch.request_counts.failed = 0
        self._batch.usage = None
        done = set()
        for first in range(0, num_lines, GROUP):
            for number, stored in (await self._answers(first)).items():
                self._count(stored["status"], stored["line"]["response"]["body"])
                done.add(number)
        return done

    async def _answers(self, first: int) -> dict[int, dict[str, Any]]:
        """The stored answers of a group of lines, by number."""
        found = await self._journal.list_objects(self._tenant, _group_key(self._batch.id, first))
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in found}

    async def _finalize(self, lines: list[Line], end: str) -> None:
        self._batch.enter("finalizing")
        await self._put()
        await self._count_answers(len(lines))
        output, errors = self._writer("output"), self._writer("error")
        for first in range(0, len(lines), GROUP):
            stored = await self._answers(first)
            for number in range(first, min(first + GROUP, len(lines))):
                answer = stored.get(number)
                if answer is None:
                    code, message = REASONS[end]
                    missing = self._shown(number, lines[number], None, {"code": code, "message": message})
                    await self._append(errors, missing)
                else:
                    await self._append(output if answer["status"] < 400 else errors, answer["line"])
        for writer in (output, errors):
            if writer.file.bytes:
                await writer.finish()
        self._batch.output_file_id = output.file.id if output.file.bytes else None
        self._batch.error_file_id = errors.file.id if errors.file.bytes else None
        self._batch.enter(end)
        await self._put()

    def _writer(self, kind: str) -> FileWriter:
        # The same id for every router that writes it: one that takes over overwrites what was begun.
        name = self._batch.id.removeprefix("batch_")
        keep_s = self._batch.keep_output_s
        return self._files.writer(
            self._tenant, f"file-{kind}-{name}", f"{self._batch.id}_{kind}.jsonl", "batch_output", keep_s, self._fence
        )

    async def _append(self, writer: FileWriter, line: dict[str, Any]) -> None:
        if not writer.file.bytes:
            await writer.begin()
        await writer.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    async def _put(self, others: dict[str, bytes] | None = None) -> None:
        await self._batches.put(self._tenant, self._batch, self._fence, others)

    async def _clean_up(self) -> None:
        for first in range(0, self._batch.request_counts.total, GROUP):
            keys = [_answer_key(self._batch.id, number) for number in range(first, first + GROUP)]
            await self._journal.delete_objects(self._tenant, keys)
        await self._batches.close(self._batch.id, self._tenant)


_NO_USAGE: dict[str, Any] = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}


def _tokens(used: dict[str, Any], *names: str) -> int:
    """The APIs name their counts differently."""
    return next((int(used[name]) for name in names if name in used), 0)


def _detail(used: dict[str, Any], detail: str, *names: str) -> int:
    return next((int(used[name].get(detail) or 0) for name in names if used.get(name)), 0)


def _group_key(batch_id: str, first: int) -> str:
    return f"batch-answer/{batch_id}/{first // GROUP:04d}/"


def _answer_key(batch_id: str, number: int) -> str:
    return f"{_group_key(batch_id, number)}{number:08d}"
