"""What a terminal shows while a cluster starts: how far each rank is with its weights and its graphs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from holdfast.errors import HoldfastError

RANK = re.compile(r"worker-\d+/\d+")
POLL_S = 0.3


@asynccontextmanager
async def showing_progress() -> AsyncIterator[None]:
    """Bars on stderr meanwhile, if that is a terminal. They are gone afterwards."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        shown = _Shown(bars)
        showing = asyncio.create_task(shown.keep_up())
        try:
            yield
            with suppress(HoldfastError):
                await shown.update()  # what was loaded since the last look
        finally:
            showing.cancel()
            with suppress(asyncio.CancelledError, HoldfastError):  # the start itself says what is wrong
                await showing


class _Shown:
    """A bar for each rank and stage."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[tuple[str, str], TaskID] = {}

    async def keep_up(self) -> None:
        while True:
            await self.update()
            await asyncio.sleep(POLL_S)

    async def update(self) -> None:
        """Ask every rank that there is. Raises HoldfastError."""
        from cluster.ray_backend.processes import answer_of

        ranks = await asyncio.to_thread(_ranks)
        told = await asyncio.gather(*(answer_of(actor.progress.remote()) for actor in ranks.values()))
        for name, progress in zip(ranks, told, strict=True):
            if progress is None:
                continue
            key = (name, progress.stage)
            if key not in self._tasks:
                self._tasks[key] = self._bars.add_task(f"{name} {progress.stage}")
            self._bars.update(self._tasks[key], completed=progress.done, total=progress.total)


def _ranks() -> dict[str, Any]:
    import ray

    from cluster.ray_backend.processes import find_actor, ray_errors

    with ray_errors("nobody knows how far the start is"):
        names = sorted(filter(RANK.fullmatch, ray.util.list_named_actors()))
        return {name: actor for name in names if (actor := find_actor(name)) is not None}
