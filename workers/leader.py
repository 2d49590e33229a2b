"""The leader's loop: take commands, plan a step, tell the other ranks, apply it, collect what it gave.

One thread runs the loop and alone touches scheduler, cache and model; others hand it commands
(``submit``, ``abort``, ``call``) and get updates through one callback a step.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from holdfast.errors import HoldfastError, InvalidRequest, StaleEpoch
from holdfast.tokens import pack_tokens
from holdfast.v1 import rank_pb2, worker_pb2
from workers.collectives import Collectives
from workers.commands import answering, on_thread
from workers.config import EngineConfig
from workers.handover import Handovers
from workers.kv import Outcome
from workers.kv.prefix import common_prefix_len
from workers.messages import Submission, TurnUpdate
from workers.rank import Batch, Rank, StepResult
from workers.scheduling import Finish, Scheduler, SchedulerLimits, Step, Turn
from workers.step_log import Acks, LogWriter, RecordedCache, audit_message
from workers.stop_strings import StopStrings

T = TypeVar("T")
PREFILL_TOKENS = 128
"""A step of so many tokens tells how fast prompts are computed; a smaller one, how fast a step is."""
IDLE_WAIT_S = 0.5
MAX_EPOCHS = 65_536
"""Sessions whose epoch is remembered. The journal fences all the same; this only refuses sooner."""


class Leader:
    """Runs turns on one rank, or on a group of which it is rank 0.

    ``emit`` is called once a step, with all updates, when every rank has acked the step; ``on_crash`` if
    the loop itself fails. Then nothing of this rank's state may be trusted: the process must go.

    In a group, ``send`` takes an entry of the step log to all followers and returns at once; whoever
    gets their acks gives them to ``log.ack``.
    """

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
        self.log = LogWriter(incarnation, self.rank.shard.size - 1)
        self._send = send
        self._num_measured = 0
        self.cache = self.rank.cache
        limits = SchedulerLimits(
            context_len=self.rank.context_len,
            step_tokens=config.chunked_prefill_size,
            max_running=config.max_running_requests,
            max_waiting=config.max_queued_requests,
        )
        self.scheduler = Scheduler(self.cache, limits)
        self.handovers = Handovers(self)
        self.prefill_tokens_per_s = 0.0
        """As of late; 0: not known yet."""
        self.counters: Counter[str] = Counter()
        self._emit = emit
        self._on_crash = on_crash
        self._eos = frozenset(self.rank.model_config.eos_token_ids)
        self._stop_strings = StopStrings(config.model / "tokenizer.json")
        self._epochs: dict[str, int] = {}
        self._after_turn: dict[str, list[Callable[[], None]]] = {}
        self._updates: dict[str, TurnUpdate] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="holdfast-leader", daemon=True)

    # ---- called from any thread -------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop after its current step, and wait for it."""
        self._commands.put(None)
        self._thread.join()

    def submit(self, submission: Submission) -> None:
        """Queue a turn; what becomes of it comes through ``emit``."""
        self._commands.put(partial(self._submit, submission))

    def abort(self, turn_id: str) -> None:
        """End a turn and take its session back to its last good turn. Unknown: nothing happens."""
        self._commands.put(partial(self._abort, turn_id))

    def release_session(
        self, session_id: str, epoch: int, *, after_turn: bool = False
    ) -> Future[worker_pb2.ControlResponse]:
        """Free a session's slot; a running turn is ended first, or (``after_turn``) waited for.

        The future is done when every rank has done it. Raises StaleEpoch through it.
        """
        done: Future[worker_pb2.ControlResponse] = Future()

        def release_now() -> None:
            turn = self.scheduler.turn_of(session_id)
            if turn is not None:
                self._finish(turn, Outcome.ABORTED, Finish("abort", "released"))
            self.handovers.released(session_id, epoch)
            self.cache.release_session(session_id)
            self._epochs.pop(session_id, None)

        def release() -> None:
            self.check_epoch(session_id, epoch)
            if after_turn and self.scheduler.turn_of(session_id) is not None:
                self._after_turn.setdefault(session_id, []).append(command)
                return
            self._control(release_now, done)

        command = answering(release, done)
        self._commands.put(command)
        return done

    def turn_away(self, error: HoldfastError) -> None:
        """End every turn, running or waiting, with ``error``; the sessions are at their last good turn."""

        def turn_away() -> None:
            for turn in list(self.scheduler.turns.values()):
                self._finish(turn, Outcome.ABORTED, error)
            self._send_updates()

        self._commands.put(turn_away)

    def free_tail(self, session_id: str, epoch: int, keep_len: int) -> Future[worker_pb2.ControlResponse]:
        """Cut an idle session's KV; the future is done when every rank has done it.

        Raises StaleEpoch, SessionBusy, InvalidRequest through it.
        """

        def cut() -> None:
            self.check_epoch(session_id, epoch)
            self.handovers.end(session_id)
            if session_id in self.cache.slots:
                self.cache.free_tail(session_id, keep_len)

        return self._control_call(cut)

    def flush(self) -> Future[worker_pb2.ControlResponse]:
        """Drop idle slots and cached pages, on every rank."""
        return self._control_call(self.cache.flush)

    def fork(self, parent_id: str, child_id: str, epoch: int, at_len: int | None) -> Future[int]:
        """A new session that shares its parent's KV; the future gives how many tokens it has of it."""

        def fork() -> int:
            child = self.cache.fork(parent_id, child_id, at_len)
            self.remember_epoch(child_id, epoch)
            return child.committed_len

        return self.when_applied(fork)

    def sessions(self) -> Future[list[str]]:
        """The sessions that have a slot here."""

        def sessions() -> list[str]:
            slots = self.cache.slots.values()
            return [s.session_id for s in slots if not s.ephemeral and not self.handovers.is_under_way(s)]

        return self.call(sessions)

    def call(self, act: Callable[[], T]) -> Future[T]:
        """``act()``, in the loop's thread, between two steps. HoldfastErrors come through the future."""
        return on_thread(act, self._commands.put)

    def when_applied(self, act: Callable[[], T]) -> Future[T]:
        """As ``call``; the future is done when every rank has done what ``act`` did to the cache (law L9)."""
        done: Future[T] = Future()

        def run() -> None:
            result = act()
            self._when_applied(lambda acks: done.set_result(result))

        self._commands.put(answering(run, done))
        return done

    def audit(self) -> Future[worker_pb2.AuditResponse]:
        """Recount every page on every rank, at one index of the step log. Exact on a busy worker."""
        done: Future[worker_pb2.AuditResponse] = Future()

        def audit() -> None:
            self._record(rank_pb2.Op(audit=rank_pb2.AuditOp()))
            ours, index = audit_message(self.cache.audit()), self._control_index()
            digest = 0 if self._recorded else self.cache.digest()

            def answer(acks: Acks) -> None:
                reports = [ours]
                for rank, ack in sorted(acks.items()):
                    ack.audit.rank, ack.audit.digest = rank, ack.digest
                    reports.append(ack.audit)
                # The acks' digests were compared with the leader's: theirs is its own.
                ours.digest = reports[-1].digest if acks else digest
                ok = all(report.ok for report in reports)
                done.set_result(worker_pb2.AuditResponse(ok=ok, log_index=index, ranks=reports))

            self._when_applied(answer)

        self._commands.put(answering(audit, done))
        return done

    # ---- the other ranks ----------------------------------------------------------------------------

    @property
    def _recorded(self) -> RecordedCache | None:
        return self.cache if isinstance(self.cache, RecordedCache) else None

    def _record(self, op: rank_pb2.Op) -> None:
        if self._recorded is not None:
            self._recorded.record(op)

    def _write_log(self, batch: Batch) -> None:
        """Send what happened since the last entry, and what to compute. Nothing waits for the answer."""
        if self._recorded is None:
            self.log.last_index += bool(batch.rows)
            return
        ops = self._recorded.take_ops()
        if not ops and not batch.rows:
            return
        message = rank_pb2.Batch(
            rows=pack_tokens(array("i", batch.rows)),
            starts=pack_tokens(array("i", batch.starts)),
            counts=pack_tokens(array("i", batch.counts)),
            tokens=pack_tokens(batch.tokens),
            logit_rows=pack_tokens(array("i", batch.logit_rows)),
        )
        assert self._send is not None, "a group's leader can reach its followers"
        self._send(self.log.append(ops, message, self.cache.digest()))
        self._num_measured = 0

    def _control_index(self) -> int:
        """The index of the entry that holds the operations of this moment."""
        return self.log.last_index + (self._recorded is not None)

    def _when_applied(self, ready: Callable[[Acks], None]) -> None:
        """Call ``ready`` when every rank has applied all that was done so far (law L9)."""
        self.log.hold(self._control_index(), ready, keep_acks=True)

    def _control(self, act: Callable[[], object], done: Future[worker_pb2.ControlResponse]) -> None:
        """Do what the control plane asks for, count the pages it frees, and answer when all ranks have."""
        free_before = self.cache.pool.num_free
        self._record(rank_pb2.Op(measure=rank_pb2.MeasureOp()))
        act()
        self._record(rank_pb2.Op(measure=rank_pb2.MeasureOp(end=True)))
        freed = self.cache.pool.num_free - free_before
        # Counted at their ends: that is the order of the acks' answers.
        index, number = self._control_index(), self._num_measured
        self._num_measured += 1
        digest = 0 if self._recorded else self.cache.digest()

        def answer(acks: Acks) -> None:
            answers = [
                worker_pb2.RankAnswer(rank=r, log_index=a.index, pages_freed=a.pages_freed[number], digest=a.digest)
                for r, a in sorted(acks.items())
            ]
            ours = worker_pb2.RankAnswer(log_index=index, pages_freed=freed)
            ours.digest = answers[0].digest if answers else digest
            done.set_result(worker_pb2.ControlResponse(log_index=index, ranks=[ours, *answers]))

        self._when_applied(answer)

    def _control_call(self, act: Callable[[], object]) -> Future[worker_pb2.ControlResponse]:
        done: Future[worker_pb2.ControlResponse] = Future()
        self._commands.put(answering(lambda: self._control(act, done), done))
        return done

    # ---- the loop ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_commands():
                self.step()
        except BaseException as error:
            self._on_crash(error)
            raise

    def step(self) -> None:
        """One turn of the loop: plan -> tell -> apply -> collect."""
        step = self.scheduler.plan()
        batch = Batch.of(step.work)
        self._write_log(batch)
        began = time.monotonic()
        result = self.rank.apply(step, batch)
        self._measure(len(batch.tokens), time.monotonic() - began)
        self.scheduler.commit(step)
        self._collect(step, result)
        self._send_updates()

    def _measure(self, num_tokens: int, seconds: float) -> None:
        if num_tokens >= PREFILL_TOKENS and seconds > 0:
            before = self.prefill_tokens_per_s or num_tokens / seconds
            self.prefill_tokens_per_s = 0.5 * (before + num_tokens / seconds)

    def _take_commands(self) -> bool:
        """Run the commands that wait; with nothing to compute, wait for one. False: stop."""
        idle = not self.scheduler.turns
        while True:
            try:
                command = self._commands.get(timeout=IDLE_WAIT_S) if idle else self._commands.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            idle = False

    def _collect(self, step: Step, result: StepResult) -> None:
        self.counters["steps"] += bool(step.work)
        self.counters["computed_tokens"] += sum(work.count for work in step.work)
        self.counters["generated_tokens"] += len(result.tokens)
        for turn_id, logprobs in result.input_logprobs.items():
            self._update_of(self.scheduler.turns[turn_id]).input_logprobs += logprobs
        for turn_id, token in result.tokens.items():
            turn = self.scheduler.turns[turn_id]
            update = self._update_of(turn)
            turn.tokens.append(token)
            update.tokens.append(token)
            if turn_id in result.logprobs:
                update.logprobs.append(result.logprobs[turn_id])
            finish = self._over(turn)
            if finish is not None:
                self._finish(turn, Outcome.COMPLETED, finish)

    def _over(self, turn: Turn) -> Finish | None:
        """Whether the turn's last token ends it."""
        return turn.finish_by_token(turn.tokens[-1], self._eos, self.scheduler.max_len) or self._stop_strings.look(turn)

    # ---- commands, in the loop's thread -----------------------------------------------------------

    def _submit(self, submission: Submission) -> None:
        try:
            turn = self._admit(submission)
        except HoldfastError as error:
            self._updates[submission.turn_id] = TurnUpdate(submission.turn_id, error=error)
        else:
            if turn is None:
                self._updates[submission.turn_id] = TurnUpdate(submission.turn_id, needs_history=True)
        self._send_updates()

    def _admit(self, submission: Submission) -> Turn | None:
        """The turn, queued; None if its prefix is not here."""
        if not submission.ephemeral:
            self.check_epoch(submission.session_id, submission.epoch)
        self._end_superseded(submission)
        self.handovers.end(submission.session_id)
        slot = self.cache.slots.get(submission.session_id)
        tokens, keep_len = submission.tokens, 0
        if submission.prefix_len:
            if slot is None or len(slot.tokens) < submission.prefix_len:
                return None
            prefix = slot.tokens[: submission.prefix_len]
            if zlib.crc32(prefix) != submission.prefix_crc:
                return None
            tokens, keep_len = prefix + tokens, submission.prefix_len
        elif slot is not None:
            keep_len = common_prefix_len(slot.tokens, tokens)
        vocab_size = self.rank.model_config.vocab_size
        # The prefix was checked when it came.
        new = submission.tokens
        if not tokens or (new and not 0 <= min(new) <= max(new) < vocab_size):
            raise InvalidRequest(f"the input must hold at least one token, each from 0 to {vocab_size - 1}")
        if any(not 0 <= token < vocab_size for token in submission.params.stop_token_ids):
            raise InvalidRequest(f"stop_token_ids: each must be from 0 to {vocab_size - 1}")
        turn = Turn(
            turn_id=submission.turn_id,
            session_id=submission.session_id,
            tenant=submission.tenant,
            tokens=tokens,
            prompt_len=submission.prompt_len,
            keep_len=keep_len,
            params=submission.params,
            ephemeral=submission.ephemeral,
        )
        if turn.num_output and (over := self._over(turn)) is not None:
            # Sent again when only its end was not told: there is nothing to compute.
            self._updates[turn.turn_id] = TurnUpdate(turn.turn_id, finish=over)
            self._stop_strings.forget(turn)
            return turn
        self.scheduler.submit(turn)
        if not submission.ephemeral:
            self.remember_epoch(submission.session_id, submission.epoch)
        self.counters["turns"] += 1
        return turn

    def _end_superseded(self, submission: Submission) -> None:
        """A turn that an owner with a newer epoch replaces: perhaps the same, sent again after a break."""
        old = self.scheduler.turn_of(submission.session_id)
        if old is not None and submission.epoch > self._epochs.get(submission.session_id, 0):
            self._finish(old, Outcome.ABORTED, Finish("abort", "superseded"))

    def _abort(self, turn_id: str) -> None:
        turn = self.scheduler.turns.get(turn_id)
        if turn is not None:
            self._finish(turn, Outcome.ABORTED, Finish("abort"))
            self._send_updates()

    def _finish(self, turn: Turn, outcome: Outcome, reason: Finish | HoldfastError) -> None:
        update = self._update_of(turn)
        if isinstance(reason, HoldfastError):
            update.error = reason
            self.counters["finished_error"] += 1
        else:
            update.finish = reason
            self.counters[f"finished_{reason.reason}"] += 1
        self.scheduler.finish(turn, outcome)
        self._stop_strings.forget(turn)
        for waiting in self._after_turn.pop(turn.session_id, []):
            waiting()

    def remember_epoch(self, session_id: str, epoch: int) -> None:
        """What was done under an earlier one is refused from now on. In the loop's thread."""
        self._epochs[session_id] = epoch
        if len(self._epochs) > MAX_EPOCHS:
            del self._epochs[next(iter(self._epochs))]

    def check_epoch(self, session_id: str, epoch: int) -> None:
        """Raises StaleEpoch. In the loop's thread."""
        seen = self._epochs.get(session_id, 0)
        if epoch < seen:
            raise StaleEpoch(f"session {session_id} is at epoch {seen} here, epoch {epoch} has passed")

    def _update_of(self, turn: Turn) -> TurnUpdate:
        update = self._updates.get(turn.turn_id)
        if update is None:
            update = self._updates[turn.turn_id] = TurnUpdate(turn.turn_id, cached_len=turn.cached_len)
        return update

    def _send_updates(self) -> None:
        updates, self._updates = self._updates, {}
        news = [u for u in updates.values() if u.tokens or u.input_logprobs or u.finish or u.error or u.needs_history]
        if news:
            self.log.hold(self.log.last_index, lambda acks: self._emit(news))
