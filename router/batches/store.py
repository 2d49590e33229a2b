"""Batches in the journal: their records, and who runs each."""

from __future__ import annotations

import time
import uuid
from array import array
from typing import Any

from pydantic import BaseModel

from holdfast.errors import InvalidRequest, ResponseNotFound, TooManyFiles
from router.batches.files import KEEP_S, SYSTEM, StoredFile
from router.journal.interface import Fence, Journal

MAX_OPEN_BATCHES = 50
"""Of one tenant, that have not ended."""
ENDED = ("failed", "completed", "expired", "cancelled")
RUN = "run"
"""The turn that a batch's session has while a router runs the batch."""


class Counts(BaseModel):
    total: int = 0
    completed: int = 0
    failed: int = 0


class StoredBatch(BaseModel):
    """A batch as the journal stores it, and as the API shows it."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    errors: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    usage: dict[str, Any] | None = None
    keep_output_s: int = KEEP_S

    def enter(self, status: str) -> None:
        """Change the status, and note when."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))

    def shown(self) -> dict[str, Any]:
        """The object of the API."""
        return self.model_dump(exclude={"keep_output_s"})


class Batches:
    """Creates, finds and claims batches. The journal is shared by all routers.

    A batch has a session of ``SYSTEM``: a router that runs the batch runs a turn on it. So one living router runs
    it at a time, a lease tells when that router is gone, and its epoch fences what a former one still writes.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def create(
        self,
        tenant: str,
        model: str,
        endpoint: str,
        file: StoredFile,
        window: str,
        window_s: float,
        metadata: dict[str, str] | None = None,
        keep_output_s: int = KEEP_S,
    ) -> StoredBatch:
        """Open a batch; some router will run it. Raises InvalidRequest, TooManyFiles."""
        if file.purpose != "batch" or file.status != "processed":
            raise InvalidRequest(f"input_file_id: {file.id} is not a file for batches", "input_file_id")
        num_open = sum(batch.status not in ENDED for batch in await self.list(tenant))
        if num_open >= MAX_OPEN_BATCHES:
            raise TooManyFiles(f"{num_open} of your batches have not ended, which is the limit; wait, or cancel some")
        now = time.time()
        batch = StoredBatch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=endpoint,
            model=model,
            input_file_id=file.id,
            completion_window=window,
            created_at=int(now),
            expires_at=int(now + window_s),
            metadata=metadata,
            keep_output_s=keep_output_s,
        )
        await self.put(tenant, batch)
        await self._journal.put_objects(SYSTEM, {f"open/{batch.id}": tenant.encode()})
        return batch

    async def get(self, batch_id: str, tenant: str) -> StoredBatch:
        """Raises ResponseNotFound."""
        found = await self._journal.get_object(tenant, f"batch/{batch_id}")
        if found is None:
            raise ResponseNotFound(f"batch {batch_id} does not exist")
        batch = StoredBatch.model_validate_json(found)
        cancelling_at = await self.cancelling_at(batch_id, tenant)
        if batch.status not in ENDED and cancelling_at is not None:
            batch.status, batch.cancelling_at = "cancelling", cancelling_at
        return batch

    async def list(self, tenant: str) -> list[StoredBatch]:
        """All batches, the oldest first."""
        found = await self._journal.list_objects(tenant, "batch/")
        batches = [StoredBatch.model_validate_json(value) for _, value in found]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id))

    async def put(
        self, tenant: str, batch: StoredBatch, fence: Fence | None = None, others: dict[str, bytes] | None = None
    ) -> None:
        """Store a batch, and ``others`` with it."""
        objects = {f"batch/{batch.id}": batch.model_dump_json().encode()} | (others or {})
        await self._journal.put_objects(tenant, objects, fence)

    async def cancel(self, batch_id: str, tenant: str) -> StoredBatch:
        """Ask the batch's router to end it. Raises ResponseNotFound, InvalidRequest if it has ended."""
        batch = await self.get(batch_id, tenant)
        if batch.status in ENDED:
            raise InvalidRequest(f"batch {batch_id} cannot be cancelled: it is {batch.status}")
        if batch.status != "cancelling":
            await self._journal.put_objects(tenant, {f"batch-cancel/{batch_id}": str(int(time.time())).encode()})
        return await self.get(batch_id, tenant)

    async def cancelling_at(self, batch_id: str, tenant: str) -> int | None:
        """When the batch was cancelled, if it was."""
        found = await self._journal.get_object(tenant, f"batch-cancel/{batch_id}")
        return int(found) if found is not None else None

    async def open(self) -> dict[str, str]:
        """The batches of all tenants that have not ended: the tenant of each."""
        found = await self._journal.list_objects(SYSTEM, "open/")
        return {key.partition("/")[2]: tenant.decode() for key, tenant in found}

    async def claim(self, batch_id: str) -> Fence:
        """Make an open batch this router's.

        Raises SessionBusy while a living router runs it, SessionReleased if it has ended.
        """
        record = await self._journal.take(batch_id, SYSTEM, create=True)
        await self._journal.begin_turn(batch_id, record.epoch, RUN, 0, array("i"), b"")
        return Fence(batch_id, record.epoch)

    async def give_up(self, batch_id: str) -> None:
        """Let any router claim the batch."""
        await self._journal.leave_turn(batch_id, RUN)

    async def close(self, batch_id: str, tenant: str) -> None:
        """Forget that an ended batch was open. Idempotent."""
        await self._journal.release(batch_id, SYSTEM)
        await self._journal.delete_objects(tenant, [f"batch-cancel/{batch_id}"])
        await self._journal.delete_objects(SYSTEM, [f"open/{batch_id}"])
