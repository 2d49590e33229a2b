"""What one session holds on a rank: its slot, with the page table and the lengths.

A slot's positions, in half-open ranges (page_size 4, pages A B C D)::

        A       B       C       D
    |. . . .|. . . .|. . . .|. . . .|
     [0, committed_len)  KV computed and valid
                     [committed_len, allocated_len)  the tail: pages held, KV not valid
     tokens may reach past committed_len: known, KV not yet computed (the last sampled token)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from workers.kv.prefix import PrefixEntry


class Outcome(Enum):
    """How a turn ended, as far as its KV is concerned (law L7)."""

    COMPLETED = "completed"
    """The turn stopped or reached its length: the session keeps what was computed."""
    ABORTED = "aborted"
    """Client gone, error or release: the session returns to its last good turn."""
    RETRACTED = "retracted"
    """The turn leaves the batch and will resume; its KV stays while there is room."""


def new_tokens(values: Sequence[int] = ()) -> array[int]:
    """Token ids as the core keeps them: 32-bit, contiguous, comparable and hashable as bytes."""
    return array("i", values)


@dataclass(slots=True, eq=False)
class Slot:
    """What one session (or one request without a session) holds on this rank."""

    session_id: str
    tenant: str
    row: int
    """Row of the device's page tables, fixed for the slot's lifetime."""
    ephemeral: bool
    """A request without a session: the slot ends with its turn."""
    pages: list[int] = field(default_factory=list)
    """The page table: position ``i`` is in ``pages[i // page_size]``. Only ``PageTables`` changes it."""
    entries: list[PrefixEntry] = field(default_factory=list)
    """The prefix index entries of pages [0, len(entries))."""
    tokens: array[int] = field(default_factory=new_tokens)
    committed_len: int = 0
    allocated_len: int = 0
    turn_id: str | None = None
    """The turn that owns the slot: running, or retracted and waiting to resume."""
    running: bool = False
    base_len: int = 0
    """The session's length when its turn began: an abort returns to it."""
