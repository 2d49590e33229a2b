"""The leader's end of replication: what enters the step log, and what waits for every rank's ack (L8, L9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from holdfast.v1 import rank_pb2, worker_pb2
from workers.engine.batch import Batch
from workers.engine.step_log import Acks, LogWriter, RecordedCache, audit_message, pages_freed
from workers.kv import SessionCache


class Replication:
    """Replicates one leader's cache to the followers; a worker of one rank has none, and nothing waits.

    ``send`` takes an entry of the step log to all followers and returns at once; the followers' acks go
    to ``log.ack``. Everything else is called in the leader's thread.
    """

    def __init__(self, cache: SessionCache, log: LogWriter, send: Callable[[rank_pb2.Entry], None] | None) -> None:
        self._cache = cache
        self._recorded = cache if isinstance(cache, RecordedCache) else None
        self.send = send
        self._num_measured = 0
        self.log = log

    def write(self, batch: Batch) -> None:
        """Send the operations since the last entry, and the batch to compute. Does not wait for acks."""
        if self._recorded is None:
            self.log.last_index += bool(batch.rows)
            return
        ops = self._recorded.take_ops()
        if not ops and not batch.rows:
            return
        assert self.send is not None, "a group's leader can reach its followers"
        self.send(self.log.append(ops, batch.message(), self._cache.digest()))
        self._num_measured = 0

    def when_applied(self, ready: Callable[[Acks], None]) -> None:
        """Call ``ready`` when every rank has applied all operations so far (law L9)."""
        self.log.hold(self._next_index(), ready, keep_acks=True)

    def control(self, act: Callable[[], object], done: Future[worker_pb2.ControlResponse]) -> None:
        """Run a control-plane command, count the pages it frees, and answer when every rank has applied it."""
        free_before = self._cache.num_free()
        self._record(rank_pb2.Op(measure=rank_pb2.MeasureOp()))
        act()
        self._record(rank_pb2.Op(measure=rank_pb2.MeasureOp(end=True)))
        freed = pages_freed(self._cache, free_before)
        # Numbered at their ends, as the followers do: commands may nest.
        index, number = self._next_index(), self._num_measured
        self._num_measured += 1
        digest = 0 if self._recorded else self._cache.digest()

        def answer(acks: Acks) -> None:
            answers = [_answer(0, index, freed, digest)]
            for rank, ack in sorted(acks.items()):
                answers.append(_answer(rank, ack.index, ack.pages_freed[number].by_group, ack.digest))
            answers[0].digest = answers[-1].digest  # every ack's digest was found equal to the leader's
            done.set_result(worker_pb2.ControlResponse(log_index=index, ranks=answers))

        self.when_applied(answer)

    def audit(self, done: Future[worker_pb2.AuditResponse]) -> None:
        """Audit every rank at one index of the step log."""
        self._record(rank_pb2.Op(audit=rank_pb2.AuditOp()))
        ours, index = audit_message(self._cache.audit()), self._next_index()
        digest = 0 if self._recorded else self._cache.digest()

        def answer(acks: Acks) -> None:
            reports = [ours]
            for rank, ack in sorted(acks.items()):
                ack.audit.rank, ack.audit.digest = rank, ack.digest
                reports.append(ack.audit)
            # Every ack's digest was found equal to the leader's.
            ours.digest = reports[-1].digest if acks else digest
            ok = all(report.ok for report in reports)
            done.set_result(worker_pb2.AuditResponse(ok=ok, log_index=index, ranks=reports))

        self.when_applied(answer)

    def _record(self, op: rank_pb2.Op) -> None:
        if self._recorded is not None:
            self._recorded.record(op)

    def _next_index(self) -> int:
        """The index of the entry that will hold the operations done now."""
        return self.log.last_index + (self._recorded is not None)


def _answer(rank: int, log_index: int, freed: Sequence[int], digest: int) -> worker_pb2.RankAnswer:
    return worker_pb2.RankAnswer(
        rank=rank, log_index=log_index, pages_freed=sum(freed), pages_freed_by_group=freed, digest=digest
    )
