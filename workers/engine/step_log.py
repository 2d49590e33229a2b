"""The step log keeps the ranks of a worker in the same state (laws L8 and L9).

The leader's ``RecordedCache`` records every operation that changes it. An ``Entry`` carries the
operations since the last entry, the batch to compute, and the digest of the state after them.
``LogReader`` applies entries to another rank's cache and refuses those that do not fit. ``LogWriter``
numbers the entries and holds back what must not be shown before every rank has acked them.

No clock, no sockets, no threads of its own: the edges carry the messages.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from holdfast.errors import RankDiverged
from holdfast.tokens import pack_tokens, unpack_tokens
from holdfast.v1 import rank_pb2, worker_pb2
from workers.kv import OWN_SCOPE, AuditReport, GroupSpec, KVScope, Outcome, SessionCache, Slot

Acks: TypeAlias = dict[int, rank_pb2.Ack]
"""By rank."""
MAX_LAG = 1024
"""Entries that a rank may lag. Collectives keep ranks within a step or two of each other; a rank that lags
this far has stopped."""


class RecordedCache(SessionCache):
    """The leader's cache. Records each operation that succeeds; one that fails changes nothing."""

    def __init__(
        self, groups: Sequence[GroupSpec], page_size: int, max_slots: int = 1024, num_resume_points: int = 1
    ) -> None:
        super().__init__(groups, page_size, max_slots, num_resume_points)
        self._ops: list[rank_pb2.Op] = []

    def record(self, op: rank_pb2.Op) -> None:
        """Add an operation: one just done, or an audit or a measurement."""
        self._ops.append(op)

    def take_ops(self) -> list[rank_pb2.Op]:
        """The operations since the last call, in order."""
        ops, self._ops = self._ops, []
        return ops

    def open(self, session_id: str, tenant: str = "", *, scope: KVScope = OWN_SCOPE, ephemeral: bool = False) -> Slot:
        scope = scope.named_by(tenant)
        known, changes_share = self.slots.get(session_id), self.scopes.is_new(scope)
        slot = super().open(session_id, tenant, scope=scope, ephemeral=ephemeral)
        if slot is not known or changes_share:
            op = rank_pb2.OpenOp(session_id=session_id, tenant=tenant, ephemeral=ephemeral, scope=scope_message(scope))
            self.record(rank_pb2.Op(open=op))
        return slot

    def resume(
        self, session_id: str, turn_id: str, tokens: array[int], keep_len: int, *, match_prefix: bool = True
    ) -> int:
        cached_len = super().resume(session_id, turn_id, tokens, keep_len, match_prefix=match_prefix)
        # Only the tokens past keep_len: a turn costs its new tokens.
        new = pack_tokens(tokens[keep_len:])
        op = rank_pb2.ResumeOp(session_id=session_id, turn_id=turn_id, tokens=new, keep_len=keep_len)
        op.match_prefix = match_prefix
        self.record(rank_pb2.Op(resume=op))
        return cached_len

    def reserve(self, session_id: str, num_tokens: int) -> None:
        super().reserve(session_id, num_tokens)
        self._record_extend([session_id], num_tokens, reserve=True)

    def extend(self, session_id: str, num_tokens: int) -> None:
        super().extend(session_id, num_tokens)
        self._record_extend([session_id], num_tokens)

    def extend_imported(
        self, session_id: str, num_tokens: int, turn_starts: Sequence[int], columns: Sequence[Collection[int]]
    ) -> None:
        super().extend_imported(session_id, num_tokens, turn_starts, columns)
        op = rank_pb2.ExtendImportedOp(session_id=session_id, num_tokens=num_tokens)
        op.turn_starts = pack_tokens(array("i", turn_starts))
        op.columns.extend(pack_tokens(array("i", part)) for part in columns)
        self.record(rank_pb2.Op(extend_imported=op))

    def extend_by_one(self, session_ids: Sequence[str]) -> int:
        num_done = super().extend_by_one(session_ids)
        if num_done:
            self._record_extend(session_ids[:num_done], 1)
        return num_done

    def _record_extend(self, session_ids: Sequence[str], num_tokens: int, *, reserve: bool = False) -> None:
        op = rank_pb2.ExtendOp(rows=self._rows_of(session_ids), num_tokens=num_tokens, reserve=reserve)
        self.record(rank_pb2.Op(extend=op))

    def _rows_of(self, session_ids: Iterable[str]) -> bytes:
        slots = self.slots
        return pack_tokens(array("i", [slots[session_id].row for session_id in session_ids]))

    def commit(self, computed: Mapping[str, array[int]]) -> None:
        super().commit(computed)
        if computed:
            counts = pack_tokens(array("i", [len(tokens) for tokens in computed.values()]))
            tokens = pack_tokens(array("i", b"".join(computed.values())))
            op = rank_pb2.CommitOp(rows=self._rows_of(computed), counts=counts, tokens=tokens)
            self.record(rank_pb2.Op(commit=op))

    def cut_tails(self, session_ids: Sequence[str]) -> None:
        super().cut_tails(session_ids)
        self.record(rank_pb2.Op(cut_tails=rank_pb2.CutTailsOp(rows=self._rows_of(session_ids))))

    def finish(self, session_id: str, turn_id: str, outcome: Outcome, known: array[int] | None = None) -> None:
        super().finish(session_id, turn_id, outcome, known)
        op = rank_pb2.FinishOp(session_id=session_id, turn_id=turn_id, outcome=outcome.value)
        if known is not None:
            op.known = pack_tokens(known)
        self.record(rank_pb2.Op(finish=op))

    def free_tail(self, session_id: str, keep_len: int) -> int:
        freed = super().free_tail(session_id, keep_len)
        self.record(rank_pb2.Op(free_tail=rank_pb2.FreeTailOp(session_id=session_id, keep_len=keep_len)))
        return freed

    def release_session(self, session_id: str, *, moved: bool = False) -> int:
        freed = super().release_session(session_id, moved=moved)
        self.record(rank_pb2.Op(release=rank_pb2.ReleaseOp(session_id=session_id, moved=moved)))
        return freed

    def fork(self, parent_id: str, child_id: str, at_len: int | None = None, *, for_reading: bool = False) -> Slot:
        child = super().fork(parent_id, child_id, at_len, for_reading=for_reading)
        op = rank_pb2.ForkOp(parent_id=parent_id, child_id=child_id, at_len=at_len, for_reading=for_reading)
        self.record(rank_pb2.Op(fork=op))
        return child

    def flush(self, tenant: str | None = None) -> None:
        super().flush(tenant)
        self.record(rank_pb2.Op(flush=rank_pb2.FlushOp(tenant=tenant)))


class LogWriter:
    """The leader's side: numbers entries, checks acks, and runs held callbacks in order.

    The leader's thread calls ``append`` and ``hold``, another thread calls ``ack``. A callback runs in
    the thread that made it ready, one at a time.
    """

    def __init__(self, incarnation: int, num_followers: int) -> None:
        self.incarnation = incarnation
        self.last_index = 0
        self.acked: dict[int, int] = dict.fromkeys(range(1, num_followers + 1), 0)
        self._digests: deque[tuple[int, int]] = deque()
        self._held: deque[tuple[int, Callable[[Acks], None]]] = deque()
        self._kept: dict[int, Acks] = {}
        self._lock = threading.Lock()

    def append(self, ops: list[rank_pb2.Op], batch: rank_pb2.Batch | None, digest: int) -> rank_pb2.Entry:
        """The next entry. Raises RankDiverged if a rank is too far behind."""
        with self._lock:
            self.last_index += 1
            self._digests.append((self.last_index, digest))
            if len(self._digests) > MAX_LAG:
                behind = min(self.acked, key=self.acked.__getitem__)
                raise RankDiverged(f"rank {behind} is {MAX_LAG} entries behind, at {self.acked[behind]}")
            return rank_pb2.Entry(
                incarnation=self.incarnation, index=self.last_index, ops=ops, batch=batch, digest=digest
            )

    def hold(self, index: int, ready: Callable[[Acks], None], *, keep_acks: bool = False) -> None:
        """Call ``ready`` when every follower has acked ``index``, in the order of the calls to ``hold``.

        ``index`` may be the next entry's. With ``keep_acks``, ``ready`` receives that entry's acks.
        """
        with self._lock:
            if keep_acks:
                self._kept.setdefault(index, {})
            self._held.append((index, ready))
            self._run_ready()

    def ack(self, rank: int, ack: rank_pb2.Ack) -> None:
        """Raises RankDiverged for an ack out of order or with another digest than the leader's."""
        with self._lock:
            if ack.index != self.acked[rank] + 1:
                raise RankDiverged(f"rank {rank} acked entry {ack.index} after {self.acked[rank]}")
            first = self._digests[0][0] if self._digests else self.last_index + 1
            if not first <= ack.index <= self.last_index:
                raise RankDiverged(f"rank {rank} acked entry {ack.index}, which was never sent")
            expected = self._digests[ack.index - first][1]
            if ack.digest != expected:
                raise RankDiverged(
                    f"rank {rank} has digest {ack.digest:016x} at entry {ack.index}, the leader {expected:016x}"
                )
            self.acked[rank] = ack.index
            if ack.index in self._kept:
                self._kept[ack.index][rank] = ack
            reached = min(self.acked.values())
            while self._digests and self._digests[0][0] <= reached:
                self._digests.popleft()
            self._run_ready()

    def _run_ready(self) -> None:
        reached = min(self.acked.values(), default=self.last_index)
        while self._held and self._held[0][0] <= reached:
            index, ready = self._held.popleft()
            ready(self._kept.get(index, {}))
            if not self._held or self._held[0][0] != index:
                self._kept.pop(index, None)


class LogReader:
    """A follower's side: applies entries to its cache."""

    def __init__(self, cache: SessionCache, incarnation: int) -> None:
        self.cache = cache
        self.incarnation = incarnation
        self.last_index = 0

    def apply(self, entry: rank_pb2.Entry) -> rank_pb2.Ack:
        """Apply an entry's operations. Raises RankDiverged: this rank's state is invalid then."""
        if entry.incarnation != self.incarnation:
            raise RankDiverged(f"entry of incarnation {entry.incarnation}, this rank is of {self.incarnation}")
        if entry.index != self.last_index + 1:
            raise RankDiverged(f"entry {entry.index} came after entry {self.last_index}")
        ack = rank_pb2.Ack(index=entry.index)
        begun: list[list[int]] = []  # measurements nest: a command may end a turn that another command waits for
        try:
            for op in entry.ops:
                kind = op.WhichOneof("op")
                if kind == "measure" and op.measure.end:
                    ack.pages_freed.add(by_group=pages_freed(self.cache, begun.pop()))
                elif kind == "measure":
                    begun.append(self.cache.num_free())
                elif kind == "audit":
                    ack.audit.CopyFrom(audit_message(self.cache.audit()))
                else:
                    _apply(self.cache, kind, op)
        except Exception as error:
            raise RankDiverged(f"entry {entry.index} cannot be applied: {error!r}") from error
        ack.digest = self.cache.digest()
        if ack.digest != entry.digest:
            raise RankDiverged(f"digest {ack.digest:016x} at entry {entry.index}, the leader has {entry.digest:016x}")
        self.last_index = entry.index
        return ack


def _apply(cache: SessionCache, kind: str | None, op: rank_pb2.Op) -> None:
    match kind:
        case "extend":
            session_ids = _session_ids(cache, op.extend.rows)
            if op.extend.reserve:
                cache.reserve(session_ids[0], op.extend.num_tokens)
            elif len(session_ids) == 1:
                cache.extend(session_ids[0], op.extend.num_tokens)
            elif op.extend.num_tokens != 1 or cache.extend_by_one(session_ids) != len(session_ids):
                raise ValueError(f"{len(session_ids)} slots cannot be extended by {op.extend.num_tokens}")
        case "extend_imported":
            imported = op.extend_imported
            columns = [unpack_tokens(part) for part in imported.columns]
            cache.extend_imported(
                imported.session_id, imported.num_tokens, unpack_tokens(imported.turn_starts).tolist(), columns
            )
        case "commit":
            tokens, ends = unpack_tokens(op.commit.tokens), list(accumulate(unpack_tokens(op.commit.counts)))
            spans = zip([0, *ends], ends, strict=False)
            parts = (tokens[start:end] for start, end in spans)
            cache.commit(dict(zip(_session_ids(cache, op.commit.rows), parts, strict=True)))
        case "cut_tails":
            cache.cut_tails(_session_ids(cache, op.cut_tails.rows))
        case "open":
            scope = scope_of(op.open.scope)
            cache.open(op.open.session_id, op.open.tenant, scope=scope, ephemeral=op.open.ephemeral)
        case "resume":
            resume = op.resume
            kept = cache.slots[resume.session_id].tokens[: resume.keep_len]
            tokens = kept + unpack_tokens(resume.tokens)
            cache.resume(resume.session_id, resume.turn_id, tokens, resume.keep_len, match_prefix=resume.match_prefix)
        case "finish":
            known = unpack_tokens(op.finish.known) if op.finish.HasField("known") else None
            cache.finish(op.finish.session_id, op.finish.turn_id, Outcome(op.finish.outcome), known)
        case "free_tail":
            cache.free_tail(op.free_tail.session_id, op.free_tail.keep_len)
        case "release":
            cache.release_session(op.release.session_id, moved=op.release.moved)
        case "fork":
            fork, at_len = op.fork, op.fork.at_len if op.fork.HasField("at_len") else None
            cache.fork(fork.parent_id, fork.child_id, at_len, for_reading=fork.for_reading)
        case "flush":
            cache.flush(op.flush.tenant if op.flush.HasField("tenant") else None)
        case _:
            raise ValueError(f"unknown operation {kind}")


def scope_message(scope: KVScope) -> worker_pb2.KVScope:
    """A scope as it is sent."""
    return worker_pb2.KVScope(name=scope.name, share_ppm=scope.share_ppm)


def scope_of(message: worker_pb2.KVScope) -> KVScope:
    """A sent scope; the tenant's own if none was sent."""
    return KVScope(message.name, message.share_ppm)


def _session_ids(cache: SessionCache, rows: bytes) -> list[str]:
    return [cache.by_row[row].session_id for row in unpack_tokens(rows)]


def pages_freed(cache: SessionCache, free_before: list[int]) -> list[int]:
    """By group: how many more pages are free than before."""
    return [now - before for now, before in zip(cache.num_free(), free_before, strict=True)]


def audit_message(report: AuditReport) -> worker_pb2.AuditReport:
    """A rank's audit as a message. The caller fills in rank and digest."""
    return worker_pb2.AuditReport(
        ok=report.ok,
        num_slots=report.num_slots,
        num_running=report.num_running,
        faults=report.faults,
        groups=[
            worker_pb2.GroupPages(
                group=group.name,
                total=group.num_pages,
                free=group.num_free,
                cached=group.num_cached,
                held=group.num_held,
                leaked=group.leaked,
                overheld=group.overheld,
            )
            for group in report.groups
        ],
    )
