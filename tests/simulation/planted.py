"""Planted bugs, each a plausible mistake of a line or two, which the simulator must find."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast
from unittest import mock

from cluster.leadership import Leadership
from cluster.supervisor import Supervisor
from router.fleet.migration import Migrator
from router.journal.interface import SessionRecord
from router.journal.sqlite import SqliteJournal
from router.journal.sqlite_store import SqliteStore
from router.journal.supervision import SqliteLease
from router.turns.dispatch import Dispatch
from router.turns.gateway import Gateway
from router.turns.sessions import Sessions
from router.turns.settle import Settler
from router.turns.turn import LiveTurn, TurnChunk
from tests.simulation.components import Worker
from tests.simulation.disk import SimulatedJournal
from tests.simulation.model import SimulatedRank
from tests.simulation.run import run_seed
from workers.engine.outputs import Outputs
from workers.engine.step_log import LogWriter
from workers.grammar.turns import TurnGrammars
from workers.kv import SessionCache
from workers.kv.digest import StateDigest
from workers.kv.page_events import PageEvents
from workers.kv.slot import Slot
from workers.scheduling import Draft, Finish, Turn, Work
from workers.scheduling.model_speculation import HeadSpeculation
from workers.serving import page_copies
from workers.serving.page_copies import PageCopies
from workers.store.copies import CopyIndex
from workers.store.peers import Peers
from workers.store.segments import Segments

_fenced, _resume, _roll_back = SqliteStore._fenced, Gateway.resume, Settler.roll_back
_fork = SessionCache.fork
_accepted, _receive = Draft.accepted, Outputs.receive
_index_full_pages = SessionCache._index_full_pages
_missing = HeadSpeculation._missing
_reuse_after = PageCopies._reuse_after
_append, _fail_over = SqliteJournal.append, Dispatch.fail_over


async def _append_later(self: SimulatedJournal, *args: Any) -> None:
    asyncio.get_running_loop().create_task(_append(self, *args))


def _accept_any_epoch(self: SqliteStore, session_id: str, epoch: int) -> Any:
    return _fenced(self, session_id, self._row(session_id).epoch)


def _release_without_tombstone(self: SqliteStore, session_id: str, tenant: str) -> SessionRecord:
    record = self.load(session_id, tenant)
    self._db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
    self._db.execute("DELETE FROM tokens WHERE session_id = ?", (session_id,))
    return record


def _pin_without_new_epoch(self: SqliteStore, session_id: str, epoch: int, worker: str) -> int:
    self._db.execute("UPDATE sessions SET worker = ? WHERE session_id = ?", (worker, session_id))
    return epoch


def _own_without_new_epoch(self: SqliteStore, session_id: str, tenant: str) -> tuple[SessionRecord, str]:
    record, turn_id = self.load(session_id, tenant), self._row(session_id).turn_id
    self._db.execute("UPDATE sessions SET router = ? WHERE session_id = ?", (self.router, session_id))
    return record, turn_id


def _ready_at_once(self: LogWriter, index: int, ready: Callable[[Any], None], *, keep_acks: bool = False) -> None:
    ready({})


def _fork_without_references(self: SessionCache, *args: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for group in self.groups:
            stack.enter_context(mock.patch.object(group.pool, "incref"))
        return _fork(self, *args)


async def _resume_from_the_start(
    self: Gateway, session_id: str, tenant: str, turn_id: str, start: int
) -> AsyncIterator[TurnChunk]:
    async for chunk in _resume(self, session_id, tenant, turn_id, 0):
        yield chunk


async def _fail_over_without_output(self: Dispatch, turn: LiveTurn) -> Any:
    del turn.tokens[turn.prompt_len :]
    return await _fail_over(self, turn)


def _abort_anybody_s_turn(self: SqliteStore, session_id: str, turn_id: str) -> bool:
    ours = bool(self._row(session_id).turn_id == turn_id)
    if ours:
        self._drop_turn(session_id)
    return ours


def _begin_anew(self: TurnGrammars, turn: Any, compiled: Any) -> None:
    self._matchers[turn.turn_id] = compiled.deep_copy()


def _accepted_and_one(self: Draft, samples: Sequence[int]) -> int:
    return min(len(self.tokens), _accepted(self, samples) + 1)


def _reuse_after_success(self: PageCopies, done: Future[Any], buffer: bytearray) -> None:
    if done.done() and done.exception() is None:
        _reuse_after(self, done, buffer)


def _end_a_token_late(self: Outputs, turn: Turn, tokens: Sequence[int]) -> Finish | None:
    late, length = self.__dict__.setdefault("late", {}), len(turn.tokens)
    if turn in late:
        turn.tokens.append(tokens[0])
        return cast(Finish, late.pop(turn))
    finish = _receive(self, turn, tokens)
    num_received = len(turn.tokens) - length
    if finish is not None and num_received < len(tokens):
        turn.tokens.append(tokens[num_received])
        return finish
    if finish is not None:
        late[turn] = finish
    return None


def _before_its_state(self: HeadSpeculation, work: Work, drafting: Any) -> tuple[int, int]:
    start, end = _missing(self, work, drafting)
    return start, end + 1


def _index_all_pages(self: SessionCache, slot: Slot) -> None:
    with mock.patch.object(slot, "committed_len", -(-slot.committed_len // self.page_size) * self.page_size):
        _index_full_pages(self, slot)


def _zero_a_step_late(self: SimulatedRank) -> None:
    last = self.__dict__.setdefault("last_freed", [])
    for group, pages in last:
        self.kv.zero_pages(group, pages)
    last[:] = [(group.index, group.pool.take_freed()) for group in self.cache.groups if self._zeroes]


async def _renew_anybody_s(self: SqliteLease, holder: str, lease_s: float) -> bool:
    return True


async def _adopt_nothing(self: Supervisor) -> bool:
    return False


async def _drains_nothing(self: Supervisor, old: Any) -> None:
    return


async def _migrate_none(self: Migrator, source: Any, report: Any, *, patience_s: float = 0.0) -> None:
    return


def _look_at_none(arena: memoryview, found: Any, size: int, buffer: bytearray) -> Any:
    return list(found), b"".join(arena[each.offset : each.offset + size] for each in found), []


PLANTED: dict[str, Callable[[], Any]] = {
    "tokens are shown before the journal has them": lambda: mock.patch.object(SqliteJournal, "append", _append_later),
    "a stale epoch is accepted": lambda: mock.patch.object(SqliteStore, "_fenced", _accept_any_epoch),
    "a release leaves no tombstone": lambda: mock.patch.object(SqliteStore, "release", _release_without_tombstone),
    "a re-pin keeps its epoch": lambda: mock.patch.object(SqliteStore, "pin", _pin_without_new_epoch),
    "two routers own a session": lambda: mock.patch.object(SqliteStore, "_own", _own_without_new_epoch),
    "a release is answered before all ranks acked it": lambda: mock.patch.object(LogWriter, "hold", _ready_at_once),
    "a resumed stream begins at its start": lambda: mock.patch.object(Gateway, "resume", _resume_from_the_start),
    "a failover forgets the output so far": lambda: mock.patch.object(Dispatch, "fail_over", _fail_over_without_output),
    "a router rolls back the turn of another": lambda: mock.patch.object(
        SqliteStore, "abort_turn", _abort_anybody_s_turn
    ),
    "a turn that was done when its client left is forgotten": lambda: _remembers_what_it_rolls_back(),
    "a turn that fails for want of a worker is rolled back": lambda: mock.patch.object(
        Settler, "keep_shown", Settler.roll_back
    ),
    "a released session's slot stays": lambda: mock.patch.object(
        SessionCache, "release_session", lambda self, session_id: 0
    ),
    "a fork takes no references to its pages": lambda: mock.patch.object(
        SessionCache, "fork", _fork_without_references
    ),
    "a failover begins the grammar anew": lambda: mock.patch.object(TurnGrammars, "begin", _begin_anew),
    "a copy's checksum is ignored": lambda: mock.patch.object(page_copies, "_look", _look_at_none),
    "a load that fails keeps its buffer": lambda: mock.patch.object(PageCopies, "_reuse_after", _reuse_after_success),
    "a copy is named by its tokens alone": lambda: mock.patch.object(page_copies, "space_of", lambda *given: ""),
    "a page that was written again is copied": lambda: mock.patch.object(
        PageEvents, "is_unchanged", lambda self, filled, num_drops: True
    ),
    "a page that is not full is copied": lambda: mock.patch.object(SessionCache, "_index_full_pages", _index_all_pages),
    "a release is not passed on to other nodes": lambda: mock.patch.object(
        Peers, "release", lambda self, session: None
    ),
    "a release leaves copies on disks": lambda: mock.patch.object(Segments, "release", lambda self, owner: None),
    "a release leaves copies": lambda: mock.patch.object(CopyIndex, "release", lambda self, owner: 0),
    "a page is zeroed when it is in use again": lambda: mock.patch.object(
        SimulatedRank, "zero_freed", _zero_a_step_late
    ),
    "a head computes a token before its state is there": lambda: mock.patch.object(
        HeadSpeculation, "_missing", _before_its_state
    ),
    "a draft is accepted one token too far": lambda: mock.patch.object(Draft, "accepted", _accepted_and_one),
    "a draft is committed before it is verified": lambda: mock.patch.object(
        Work, "num_known", property(lambda self: self.count)
    ),
    "a turn ends a token after its end": lambda: mock.patch.object(Outputs, "receive", _end_a_token_late),
    "a drained worker is ended before its sessions have moved": lambda: mock.patch.object(
        Migrator, "_migrate_all", _migrate_none
    ),
    "the digest is not compared": lambda: _skips_a_cut(),
    "a supervisor acts without its lease": lambda: mock.patch.object(Leadership, "check", lambda self: None),
    "a supervisor renews the lease of another": lambda: mock.patch.object(SqliteLease, "renew", _renew_anybody_s),
    "a supervisor keeps nothing that it finds": lambda: mock.patch.object(Supervisor, "adopt", _adopt_nothing),
    "a generation is ended before its sessions have moved": lambda: mock.patch.object(
        Supervisor, "_drain", _drains_nothing
    ),
    "a process has no name that only one can have": lambda: mock.patch.object(Worker, "is_taken", lambda self: False),
}


@contextlib.contextmanager
def _remembers_what_it_rolls_back() -> Iterator[None]:
    """A router that finds a turn completed after all keeps its outdated session."""
    forget, rolling_back = Sessions.forget, contextvars.ContextVar("rolling_back", default=False)

    async def roll_back(self: Settler, turn: LiveTurn, session: Any) -> None:
        rolling_back.set(True)  # in this turn's end alone: it is a task of its own
        await _roll_back(self, turn, session)

    def forget_else(self: Sessions, session_id: str) -> None:
        if not rolling_back.get():
            forget(self, session_id)

    with mock.patch.object(Settler, "roll_back", roll_back), mock.patch.object(Sessions, "forget", forget_else):
        yield


@contextlib.contextmanager
def _skips_a_cut() -> Iterator[None]:
    """Followers skip some cuts, and the digest is not compared."""
    cut = SessionCache.free_tail

    def free_tail(self: SessionCache, session_id: str, keep_len: int) -> int:
        return 0 if type(self) is SessionCache else cut(self, session_id, keep_len)

    with (
        mock.patch.object(StateDigest, "update", lambda *args: 0),
        mock.patch.object(SessionCache, "free_tail", free_tail),
    ):
        yield


def seeds_to_find(name: str, max_seeds: int) -> int | None:
    """How many seeds, from 0 on, it takes until one fails; None: more than ``max_seeds``."""
    with PLANTED[name]():
        for seed in range(max_seeds):
            if run_seed(seed).violations:
                return seed + 1
    return None
