"""Finds the batches that no living router runs, and runs them."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from holdfast.errors import (
    HoldfastError,
    JournalUnavailable,
    ResponseNotFound,
    SessionBusy,
    SessionReleased,
    StaleEpoch,
)
from router.batches.files import Files
from router.batches.run import BatchRun, Call
from router.batches.store import Batches
from router.journal.interface import Fence, Journal

log = logging.getLogger("holdfast.router")
POLL_S = 1.0
"""How often a router looks for open batches. A dead router's are free after its lease."""
MAX_BATCHES = 4
"""Batches that one router runs at once. The others wait, or run on other routers."""
SWEEP_S = 600.0
"""How often expired files are deleted."""


class BatchRunner:
    """One router's share of the open batches. ``call``: of the endpoints that answer their lines."""

    def __init__(self, journal: Journal, files: Files, batches: Batches, call: Call) -> None:
        self._journal = journal
        self._files = files
        self._batches = batches
        self._call = call
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Leave this router's batches to the others."""
        tasks = [task for task in (self._task, *self._runs.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        sweep_at = 0.0
        while True:
            try:
                await self._claim_open()
                if time.monotonic() >= sweep_at:
                    sweep_at = time.monotonic() + SWEEP_S
                    await self._files.delete_expired(time.time())
            except HoldfastError as error:
                log.warning("open batches cannot be read: %s", error.message)
            except Exception:
                log.exception("open batches cannot be read")  # by the next round, perhaps
            await asyncio.sleep(POLL_S)

    async def _claim_open(self) -> None:
        for batch_id, tenant in (await self._batches.open()).items():
            if batch_id in self._runs or len(self._runs) >= MAX_BATCHES:
                continue
            try:
                fence = await self._batches.claim(batch_id)
            except SessionReleased:
                await self._batches.close(batch_id, tenant)
            except SessionBusy:
                continue
            else:
                self._runs[batch_id] = asyncio.create_task(self._run_batch(batch_id, tenant, fence))

    async def _run_batch(self, batch_id: str, tenant: str, fence: Fence) -> None:
        try:
            await self._run_to_its_end(batch_id, tenant, fence)
        except StaleEpoch:
            log.warning("batch %s was taken over by another router", batch_id)
        except JournalUnavailable as error:
            log.warning("batch %s waits for the journal: %s", batch_id, error.message)
        finally:
            with suppress(HoldfastError):
                await self._batches.give_up(batch_id)
            del self._runs[batch_id]

    async def _run_to_its_end(self, batch_id: str, tenant: str, fence: Fence) -> None:
        try:
            batch = await self._batches.get(batch_id, tenant)
        except ResponseNotFound:
            await self._batches.close(batch_id, tenant)
            return
        run = BatchRun(self._journal, self._files, self._batches, self._call, tenant, batch, fence)
        try:
            await run.run()
        except HoldfastError:
            raise
        except Exception:
            log.exception("batch %s failed", batch_id)
            await run.fail("internal_error", "the batch failed; see the router's log")
