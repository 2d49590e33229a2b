"""Helpers of the journal's tests."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable

from router.journal.interface import Journal, SessionRecord

LEASE_S = 0.4
Connect = Callable[[], Awaitable[Journal]]


async def take(journal: Journal, session_id: str = "s", tenant: str = "me") -> SessionRecord:
    return await journal.take(session_id, tenant, create=True)


def ids(*values: int) -> array:
    return array("i", values)


async def turn(journal: Journal, keep: int, given: array, output: list[int], epoch: int = 0) -> None:
    await journal.begin_turn("s", epoch, "t", keep, given, b"")
    for i, token in enumerate(output):
        await journal.append("s", epoch, "t", keep + len(given) + i, [token])
    await journal.complete_turn("s", epoch, "t", "stop")
