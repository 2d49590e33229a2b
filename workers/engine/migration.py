"""Migration of a session's KV from one worker to another: the leaders' part, and each rank's page I/O.

The source forks the session for reading, which makes its pages shared: nobody writes them (law L4). On
the target an import is a turn whose KV is read instead of computed: it resumes the session's slot,
extends it, and commits when every rank has its pages. So pages, references and lengths change through
the step log alone (law L8), and an import that fails ends as any turn does (law L7).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

from holdfast.errors import MigrationRefused, OutOfPages, SessionBusy, SessionNotFound, StaleEpoch
from holdfast.v1 import rank_pb2
from workers.engine.epochs import SessionEpochs
from workers.engine.rank import Rank
from workers.kv import FREED, KVScope, Outcome, SessionCache, new_tokens
from workers.kv.prefix import common_prefix_len
from workers.scheduling import Scheduler

T = TypeVar("T")
Columns: TypeAlias = list[list[int]]
"""Columns of a session's page tables, by KV group."""
MAX_RELEASED = 1024
"""Released sessions that are remembered, so that a late import does not bring one back (law L12)."""


@dataclass(frozen=True, slots=True)
class ExportedKV:
    """A session whose pages the source holds for a reader."""

    tenant: str
    scope: KVScope
    tokens: array[int]
    committed_len: int
    turn_starts: Sequence[int]
    columns: Columns
    """The columns of its page tables that hold a page."""
    begins_at: int = 0
    """Tokens whose KV is not in ``columns``, because the target had it."""


@dataclass(frozen=True, slots=True)
class PendingImport:
    """A session whose KV the target is reading."""

    transfer_id: str
    epoch: int
    tokens: array[int]
    cached_len: int
    committed_len: int
    columns: Columns
    """The columns of its page tables to read."""
    is_new: bool
    """The session had no slot here before."""

    @property
    def num_pages(self) -> int:
        return sum(len(part) for part in self.columns)


class LeaderLoop(Protocol):
    """What migrations need of the leader they belong to."""

    cache: SessionCache
    epochs: SessionEpochs
    scheduler: Scheduler

    def call(self, act: Callable[[], T]) -> Future[T]: ...

    def when_applied(self, act: Callable[[], T]) -> Future[T]: ...


class KVMigrations:
    """One leader's exports and imports. Methods that return a future are called from any thread."""

    def __init__(self, leader: LeaderLoop) -> None:
        self._leader = leader
        self._exports: dict[str, str] = {}
        self._imports: dict[str, PendingImport] = {}
        self._released: OrderedDict[str, int] = OrderedDict()
        self._closed = False

    def sessions(self) -> Future[list[str]]:
        """The sessions that have a slot here, without exports and imports that are not complete."""

        def sessions() -> list[str]:
            slots, ours = self._leader.cache.slots.values(), self._exports.keys() | self._imports.keys()
            return [s.session_id for s in slots if not s.ephemeral and s.session_id not in ours]

        return self._leader.call(sessions)

    # ---- source -------------------------------------------------------------------------------------

    def export(self, session_id: str, transfer_id: str) -> Future[ExportedKV]:
        """Hold an idle session's pages until ``end_export``; resolves when every rank does.

        The future raises SessionNotFound if the session has no KV here, SessionBusy, or OutOfPages (no slot is free).
        """
        return self._leader.when_applied(partial(self._export, session_id, transfer_id))

    def _export(self, session_id: str, transfer_id: str) -> ExportedKV:
        cache, name = self._leader.cache, export_slot(transfer_id)
        slot = cache.slots.get(session_id)
        if slot is not None and slot.turn_id is not None:
            raise SessionBusy(f"session {session_id} is busy with turn {slot.turn_id}")
        if slot is None or slot.committed_len == 0:
            raise SessionNotFound(f"session {session_id} has no KV on this worker")
        tokens = slot.tokens[:]
        child = cache.fork(session_id, name, for_reading=True)
        self._exports[name] = session_id
        # Resumed like a running turn, so that its pages cannot be evicted while they are read. The token past
        # the end stands for one to compute: a reader needs all that the session has.
        committed_len = cache.resume(name, transfer_id, tokens + new_tokens([0]), len(tokens), match_prefix=False)
        end = -(-committed_len // cache.page_size)
        columns = [[column for column in table.held() if column < end] for table in child.tables]
        scope = cache.scopes.named(slot.scope)
        return ExportedKV(slot.tenant, scope, tokens, committed_len, slot.turn_starts, columns)

    def end_export(self, transfer_id: str) -> None:
        """Drop the pages held for a reader. An unknown transfer is ignored."""
        self._leader.call(partial(self._end_export, export_slot(transfer_id)))

    def _end_export(self, name: str) -> None:
        if self._exports.pop(name, None) is not None:
            cache = self._leader.cache
            cache.finish(name, cache.slots[name].turn_id or "", Outcome.ABORTED)
            cache.release_session(name)
            self._leader.scheduler.made_room()

    def session_released(self, session_id: str, epoch: int) -> None:
        """End the session's exports and imports. In the leader's thread."""
        self.abort_import(session_id)
        for name in [name for name, exported in self._exports.items() if exported == session_id]:
            self._end_export(name)
        self._released[session_id] = epoch
        self._released.move_to_end(session_id)
        if len(self._released) > MAX_RELEASED:
            self._released.popitem(last=False)

    # ---- target -------------------------------------------------------------------------------------

    def close(self) -> Future[None]:
        """Abort every import, and refuse those to come: the worker is draining, and has no turn left.

        A turn that was preempted while its KV was loading leaves an import. Until that ends its session is not idle.
        """

        def close() -> None:
            self._closed = True
            for session_id in list(self._imports):
                self.abort_import(session_id)

        return self._leader.call(close)

    def begin_import(
        self, session_id: str, epoch: int, transfer_id: str, exported: ExportedKV
    ) -> Future[PendingImport]:
        """Give the session a slot, and pages for the KV that is not cached here.

        The future resolves when every rank has applied it. It raises StaleEpoch, SessionBusy,
        SessionExists, or MigrationRefused if there is no room without evicting other sessions, or what was here
        is gone.
        """
        return self._leader.when_applied(partial(self._begin_import, session_id, epoch, transfer_id, exported))

    def begin_load(self, session_id: str, epoch: int, transfer_id: str, stored: ExportedKV) -> Future[PendingImport]:
        """``begin_import`` of KV that a turn waits for: other sessions that are idle give way.

        It raises OutOfPages too.
        """
        begin = partial(self._begin_import, session_id, epoch, transfer_id, stored, for_a_turn=True)
        return self._leader.when_applied(begin)

    def _begin_import(
        self, session_id: str, epoch: int, transfer_id: str, exported: ExportedKV, *, for_a_turn: bool = False
    ) -> PendingImport:
        leader, cache, size = self._leader, self._leader.cache, self._leader.cache.page_size
        committed_len = exported.committed_len
        if self._closed:
            raise MigrationRefused("this worker is draining")
        leader.epochs.check(session_id, epoch)
        if epoch < self._released.get(session_id, 0):
            raise StaleEpoch(f"session {session_id} was released here under an epoch later than {epoch}")
        is_new = session_id not in cache.slots
        slot = cache.open(session_id, exported.tenant, scope=exported.scope)
        if slot.turn_id is not None or leader.scheduler.turn_of(session_id) is not None:
            raise SessionBusy(f"session {session_id} has a turn on this worker")
        # Keep whole pages only: pages are read whole, into pages that no other slot lists.
        keep_len = common_prefix_len(slot.tokens, exported.tokens) // size * size
        cached_len = cache.resume(session_id, transfer_id, exported.tokens, keep_len)
        missing_len = max(0, committed_len - cached_len)
        columns = [[c for c in part if missing_len and c >= cached_len // size] for part in exported.columns]
        pending = PendingImport(transfer_id, epoch, exported.tokens, cached_len, committed_len, columns, is_new)
        self._imports[session_id] = pending
        if cached_len < exported.begins_at:
            self.abort_import(session_id)
            raise MigrationRefused(f"{exported.begins_at} tokens of KV were here, of which {cached_len} are left")
        for group, part in zip(cache.groups, columns, strict=True):
            if not for_a_turn and len(part) > group.pool.num_free + group.pool.num_cached:
                self.abort_import(session_id)
                raise MigrationRefused(
                    f"{len(part)} pages of the {group.name} group are needed, {group.pool.num_free} are free"
                )
        if missing_len:
            try:
                cache.extend_imported(session_id, missing_len, exported.turn_starts, exported.columns)
            except OutOfPages:
                self.abort_import(session_id)
                raise
        return pending

    def complete_import(self, session_id: str, transfer_id: str) -> Future[int]:
        """Every rank has read its pages: commit them. The future gives the session's committed length.

        It raises MigrationRefused if a turn or a release came first.
        """
        return self._leader.when_applied(partial(self._complete_import, session_id, transfer_id))

    def complete_load(self, session_id: str, transfer_id: str) -> Future[int]:
        """``complete_import`` for a turn that waits: its future does not wait for acks, as the turn's tokens will."""
        return self._leader.call(partial(self._complete_import, session_id, transfer_id))

    def _complete_import(self, session_id: str, transfer_id: str) -> int:
        cache, pending = self._leader.cache, self._imports.get(session_id)
        if pending is None or pending.transfer_id != transfer_id:
            raise MigrationRefused(f"a turn or a release of session {session_id} came before its KV")
        del self._imports[session_id]
        reached = max(pending.cached_len, pending.committed_len)
        if reached > pending.cached_len:
            cache.commit({session_id: pending.tokens[pending.cached_len : reached]})
        cache.finish(session_id, transfer_id, Outcome.COMPLETED, pending.tokens[reached:])
        self._leader.epochs.remember(session_id, pending.epoch)
        return reached

    def cancel_import(self, session_id: str, transfer_id: str) -> None:
        """The transfer failed: the session is as it was before. An unknown transfer is ignored."""

        def cancel() -> None:
            pending = self._imports.get(session_id)
            if pending is not None and pending.transfer_id == transfer_id:
                self.abort_import(session_id)

        self._leader.call(cancel)

    def abort_import(self, session_id: str) -> None:
        """End a session's import, if there is one, before a turn or a release. In the leader's thread."""
        pending = self._imports.pop(session_id, None)
        if pending is None:
            return
        cache = self._leader.cache
        cache.finish(session_id, pending.transfer_id, Outcome.ABORTED)
        if pending.is_new:
            cache.release_session(session_id, moved=True)
        self._leader.scheduler.made_room()


def export_slot(transfer_id: str) -> str:
    """The name of the slot that holds a transfer's pages on the source."""
    return f"export/{transfer_id}"


def read_pages(rank: Rank, transfer_id: str, group: int, columns: Sequence[int]) -> list[bytes]:
    """The bytes of an exported session's pages. In the rank's thread. Raises MigrationRefused if it ended."""
    slot = rank.cache.slots.get(export_slot(transfer_id))
    pages = slot.tables[group].pages if slot is not None and group < len(slot.tables) else []
    if not all(0 <= column < len(pages) and pages[column] != FREED for column in columns):
        raise MigrationRefused(f"pages {columns} of group {group} of transfer {transfer_id} are not exported here")
    wanted = [pages[column] for column in columns]
    return rank.stream.run(lambda: rank.kv.read_pages(group, wanted)).result()


def write_pages(
    rank: Rank,
    request: rank_pb2.FetchRequest,
    group: int,
    columns: Sequence[int],
    pages: bytes | memoryview,
) -> None:
    """Write received pages, one after another, into those that the log allocated for them.

    In the rank's thread, or in one that holds ``Rank.cache_lock``, if the rank ``writes_at_once``.

    Raises MigrationRefused if a turn or a release came first: the pages may be another slot's by then.
    """
    slot = rank.cache.slots.get(request.session_id)
    if slot is None or slot.turn_id != request.transfer_id or not slot.running:
        raise MigrationRefused(f"a turn or a release of session {request.session_id} came before its KV")
    table = slot.tables[group].pages
    targets = [table[column] for column in columns]
    rank.zero_freed()
    rank.stream.run(lambda: rank.kv.write_pages(group, targets, pages)).result()
