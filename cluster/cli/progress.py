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
        showing = asyncio.create_task(_show(bars))
        try:
            yield
        finally:
            showing.cancel()
            with suppress(asyncio.CancelledError, HoldfastError):  # the start itself says what is wrong
                await showing


async def _show(bars: Bars) -> None:
    import ray

    from cluster.ray_backend.processes import answer_of, find_actor, ray_errors

    def ranks() -> dict[str, Any]:
        with ray_errors("nobody knows how far the start is"):
            names = sorted(filter(RANK.fullmatch, ray.util.list_named_actors()))
            return {name: actor for name in names if (actor := find_actor(name)) is not None}

    tasks: dict[tuple[str, str], TaskID] = {}
    while True:
        found = await asyncio.to_thread(ranks)
        told = await asyncio.gather(*(answer_of(actor.progress.remote()) for actor in found.values()))
        for name, progress in zip(found, told, strict=True):
            if progress is None:
                continue
            key = (name, progress.stage)
            if key not in tasks:
                tasks[key] = bars.add_task(f"{name} {progress.stage}", total=progress.total)
            bars.update(tasks[key], completed=progress.done, total=progress.total)
        await asyncio.sleep(POLL_S)
