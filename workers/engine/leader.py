"""The leader's loop: take commands, plan a step, write it to the log, apply it, collect its results.

One thread runs the loop, and only it touches the scheduler, the cache and the model. Other threads hand
it commands (``submit``, ``abort``, ``call``) and receive updates through one callback a step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from holdfast.errors import HoldfastError
from holdfast.v1 import rank_pb2, worker_pb2
from workers.config import EngineConfig
from workers.engine.admission import Admission
from workers.engine.batch import Batch
from workers.engine.choice import InFlight
from workers.engine.collectives import Collectives
from workers.engine.commands import call_in_thread, reporting_errors
from workers.engine.drafts import TurnDrafts
from workers.engine.epochs import SessionEpochs
from workers.engine.gate import Gate
from workers.engine.messages import Submission, TurnUpdate
from workers.engine.migration import KVMigrations
from workers.engine.outputs import Outputs
from workers.engine.pace import Pace
from workers.engine.rank import Rank
from workers.engine.receiving import Receiver
from workers.engine.replication import Replication
from workers.engine.step_log import LogWriter
from workers.grammar.matcher import Matcher
from workers.grammar.stop_patterns import StopPatterns
from workers.grammar.turns import Masks, TurnGrammars
from workers.kv import Outcome
from workers.scheduling import Finish, Scheduler, SchedulerLimits, Step, Turn, Work

T = TypeVar("T")
IDLE_WAIT_S = 0.5


class Leader:
    """Runs turns on one rank, or on a group of ranks of which it is rank 0.

    ``emit`` is called once a step with all updates, when every rank has acked the step. ``on_crash`` is
    called if the loop fails: this rank's state is invalid then, and its process must end.

    In a group, ``send`` takes an entry of the step log to all followers and returns at once; the
    followers' acks go to ``log.ack``.
    """

    _grammar_executor: Executor | None = None

    def __init__(
        self,
        config: EngineConfig,
        emit: Callable[[list[TurnUpdate]], None],
        on_crash: Callable[[BaseException], None],
        *,
        incarnation: int = 0,
        group: Collectives | None = None,
        send: Callable[[rank_pb2.Entry], None] | None = None,
    ) -> None:
        self.rank = Rank(config, group)
        self.cache = self.rank.cache
        self.log = LogWriter(incarnation, self.rank.shard.size - 1)
        self._replication = Replication(self.cache, self.log, send)
        limits = SchedulerLimits(
            context_len=self.rank.context_len,
            step_tokens=self.rank.step_tokens,
            max_running=config.max_running_requests,
            max_waiting=config.max_queued_requests,
        )
        self.counters: Counter[str] = Counter()
        grammars = TurnGrammars(self.rank.grammar_compiler, self._grammar_executor)
        self.drafts = TurnDrafts(config, self.rank, grammars, self.counters)
        self.scheduler = Scheduler(self.cache, limits, self.drafts)
        self.epochs = SessionEpochs()
        self.migrations = KVMigrations(self)
        self.pace = Pace()
        self._emit, self._on_crash = emit, on_crash
        self._outputs = Outputs(config.model / "tokenizer.json", self.rank.model_config.eos_token_ids, grammars)
        self._received = Receiver(self._outputs, self.drafts)
        self.admission = Admission(self.rank, self.scheduler, self._outputs, self.drafts)
        self.gate = Gate(config.grammar_timeout_s, lambda command: self._commands.put(command))
        self._after_turn: dict[str, list[Callable[[], None]]] = {}
        self._in_flight: InFlight | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holdfast-leader", daemon=True)

    # ---- the loop, in its own thread ----------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._run_commands():
                self.step()
        except BaseException as error:
            self._on_crash(error)
            raise

    def step(self) -> None:
        """One iteration: plan -> write the log -> launch -> collect.

        With overlap, what is collected is the step before: the device computes one while the host plans the next.
        What a step samples depends on what was collected, so it is chosen after that: ends are exact. Around drafts
        it is collected first.
        """
        with self.rank.cache_lock:
            self._received.add(self.gate.end_overdue())
            if self._in_flight and self.drafts.need_results(self._in_flight.step):
                self.collect()
            step = self.scheduler.plan()
            self.rank.update(step.copies, step.table_updates)
            self.drafts.compute(step)
            batch = Batch.of(step.work, self._in_flight.sampling if self._in_flight else ())
            self._replication.write(batch)
            # Known before the launch if nothing is in flight: then masks are computed beside the forward pass.
            sampling = self._sampling(step) if self._in_flight is None else None
            began = time.monotonic()
        self.rank.launch(batch, len(step.copies))
        with self.rank.cache_lock:
            self.collect()
            self.scheduler.commit(step)
            if step.work:
                live, masks = sampling or self._sampling(step)
                pending = self.rank.choose(step.work, masks)
                self._in_flight = InFlight(step, [work.turn for work in live], began, self.log.last_index, pending)
            if not self.rank.overlaps:
                self.collect()
            self.rank.tell_pages()
            self._emit_updates()

    def _sampling(self, step: Step) -> tuple[list[Work], Future[Masks] | None]:
        """The work whose next tokens a step chooses, and what grammars allow there."""
        live = [work for work in step.work if work.samples and not work.turn.ended]
        return live, self._outputs.masks(live)

    def _run_commands(self) -> bool:
        """Run the queued commands; if there is nothing to compute, wait for one. False: stop."""
        idle = not self.scheduler.has_work and self._in_flight is None
        while True:
            if idle:
                self.pace.idle()
            try:
                command = self._commands.get(timeout=IDLE_WAIT_S) if idle else self._commands.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            with self.rank.cache_lock:
                command()
            idle = False

    def collect(self) -> None:
        """Take the results of the step in flight, if there is one. In the loop's thread."""
        if self._in_flight is None:
            return
        launched, self._in_flight = self._in_flight, None
        result = launched.pending.result()
        num_computed = sum([work.count for work in launched.step.work])
        if (seconds := self.pace.collected(num_computed, launched.began)) is not None:
            self.drafts.measure(launched.step, seconds)
        self.counters["steps"] += 1
        self.counters["computed_tokens"] += num_computed
        num_generated, ends = self._received.receive(launched.step, result)
        self.counters["generated_tokens"] += num_generated
        self.scheduler.settle_drafts(launched.step)
        for turn, (outcome, reason) in ends:
            self._end(turn, outcome, reason)
        self._emit_updates(launched.log_index)

    def _emit_updates(self, log_index: int | None = None) -> None:
        """Emit what there is when every rank has acked the entry; default: the last."""
        if news := self._received.take():
            self.log.hold(log_index or self.log.last_index, lambda acks: self._emit(news))

    # ---- called from any thread -------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after its current step, and wait for it."""
        self._commands.put(None)
        self._thread.join()
        self.rank.stream.close()
        self._outputs.grammars.close()

    def submit(self, submission: Submission) -> None:
        """Queue a turn; its tokens and its end come through ``emit``."""
        self._commands.put(partial(self._submit, submission))

    def abort(self, turn_id: str) -> None:
        """End a turn and return its session to its last good turn. An unknown turn is ignored."""
        self._commands.put(partial(self._abort, turn_id))

    def end_all(self, reason: Finish | HoldfastError) -> None:
        """End every turn, running or waiting; the sessions return to their last good turns."""

        def end() -> None:
            for turn in list(self.scheduler.turns.values()):
                self._end(turn, Outcome.ABORTED, reason)
            self._received.add(self.gate.end(lambda submission: True, reason))
            self._emit_updates()

        self._commands.put(end)

    def release_session(
        self, session_id: str, epoch: int, *, after_turn: bool = False, moved: bool = False
    ) -> Future[worker_pb2.ControlResponse]:
        """Free a session's slot (see ``SessionCache``). A running turn is ended first, or waited for: ``after_turn``.

        The future resolves when every rank has applied it, or raises StaleEpoch.
        """
        done: Future[worker_pb2.ControlResponse] = Future()

        def release_now() -> None:
            if (turn := self.scheduler.turn_of(session_id)) is not None:
                self._end(turn, Outcome.ABORTED, Finish("abort", "released"))
            self._received.add(self.gate.end_session(session_id, epoch, Finish("abort", "released")))
            self.migrations.session_released(session_id, epoch)
            self.cache.release_session(session_id, moved=moved)
            self.drafts.release(session_id)
            self.epochs.released(session_id, epoch)

        def release() -> None:
            self.epochs.check(session_id, epoch)
            if after_turn and self.scheduler.turn_of(session_id) is not None:
                self._after_turn.setdefault(session_id, []).append(command)
                return
            self._replication.control(release_now, done)

        command = reporting_errors(release, done)
        self._commands.put(command)
        return done

    def free_tail(self, session_id: str, epoch: int, keep_len: int) -> Future[worker_pb2.ControlResponse]:
        """Cut an idle session's KV. The future resolves when every rank has applied it, or raises StaleEpoch,
        SessionBusy or InvalidRequest.
        """

        def cut() -> None:
            self.epochs.check(session_id, epoch)
            self.migrations.abort_import(session_id)
            if session_id in self.cache.slots:
                self.cache.free_tail(session_id, keep_len)

        return self._control(cut)

    def flush(self, tenant: str | None = None) -> Future[worker_pb2.ControlResponse]:
        """See ``SessionCache.flush``; on every rank."""
        return self._control(partial(self.cache.flush, tenant))

    def fork(self, parent_id: str, child_id: str, epoch: int, at_len: int | None) -> Future[int]:
        """A new session that shares its parent's KV. The future gives the number of tokens shared."""

        def fork() -> int:
            child = self.cache.fork(parent_id, child_id, at_len)
            self.epochs.remember(child_id, epoch)
            return child.committed_len

        return self.when_applied(fork)

    def audit(self) -> Future[worker_pb2.AuditResponse]:
        """Recount every page on every rank, at one index of the step log. Exact on a busy worker."""
        done: Future[worker_pb2.AuditResponse] = Future()
        self._commands.put(reporting_errors(lambda: self._replication.audit(done), done))
        return done

    def call(self, act: Callable[[], T]) -> Future[T]:
        """Run ``act`` in the loop's thread, between two steps. The future carries its HoldfastErrors."""
        return call_in_thread(act, self._commands.put)

    def when_applied(self, act: Callable[[], T]) -> Future[T]:
        """As ``call``; the future resolves when every rank has applied what ``act`` did (law L9)."""
        done: Future[T] = Future()

        def run() -> None:
            result = act()
            self._replication.when_applied(lambda acks: done.set_result(result))

        self._commands.put(reporting_errors(run, done))
        return done

    def _control(self, act: Callable[[], object]) -> Future[worker_pb2.ControlResponse]:
        done: Future[worker_pb2.ControlResponse] = Future()
        self._commands.put(reporting_errors(lambda: self._replication.control(act, done), done))
        return done

    # ---- commands, in the loop's thread -----------------------------------------------------------

    def _submit(self, submission: Submission) -> None:
        compiled = self._outputs.compile(submission.params)
        if compiled is None:
            self._submit_compiled(submission, None)
        else:
            self.gate.wait(submission, compiled, self._submit_compiled)

    def _submit_compiled(self, submission: Submission, compiled: Future[Any] | None) -> None:
        loading = self.admission.loading(submission)
        if loading is None:
            self._submit_loaded(submission, compiled)
        else:
            self.gate.wait(submission, loading, lambda s, _: self._submit_loaded(s, compiled), limited=False)

    def _submit_loaded(self, submission: Submission, compiled: Future[Any] | None) -> None:
        try:
            update = self._admit(submission, compiled.result() if compiled is not None else None)
        except HoldfastError as error:
            update = TurnUpdate(submission.turn_id, error=error)
        if update is not None:
            self._received.add({submission.turn_id: update})
        self._emit_updates()

    def _admit(self, submission: Submission, compiled: Matcher | StopPatterns | None) -> TurnUpdate | None:
        """Queue the turn, or say why it is not: its prefix is not here, or nothing is left to compute."""
        if not submission.ephemeral:
            self.epochs.check(submission.session_id, submission.epoch)
        self._end_superseded(submission)
        self.migrations.abort_import(submission.session_id)
        turn, finish = self.admission.admit(submission, compiled)
        if turn is None or finish is not None:
            return TurnUpdate(submission.turn_id, finish=finish, needs_history=turn is None)
        if not submission.ephemeral:
            self.epochs.remember(submission.session_id, submission.epoch)
        self.counters["turns"] += 1
        return None

    def _end_superseded(self, submission: Submission) -> None:
        """End a turn that an owner with a later epoch replaces, possibly by the same turn after a failover."""
        old = self.scheduler.turn_of(submission.session_id)
        if old is not None and submission.epoch > self.epochs.latest(submission.session_id):
            self._end(old, Outcome.ABORTED, Finish("abort", "superseded"))

    def _abort(self, turn_id: str) -> None:
        if (turn := self.scheduler.turns.get(turn_id)) is not None:
            self._end(turn, Outcome.ABORTED, Finish("abort"))
        self._received.add(self.gate.end(lambda s: s.turn_id == turn_id, Finish("abort")))
        self._emit_updates()

    def _end(self, turn: Turn, outcome: Outcome, reason: Finish | HoldfastError) -> None:
        update = self._received.update_of(turn)
        if isinstance(reason, HoldfastError):
            update.error = reason
            self.counters["finished_error"] += 1
        else:
            update.finish = reason
            self.counters[f"finished_{reason.reason}"] += 1
        self.scheduler.finish(turn, outcome)
        self._outputs.forget(turn)
        self.drafts.forget(turn)
        for waiting in self._after_turn.pop(turn.session_id, []):
            waiting()
