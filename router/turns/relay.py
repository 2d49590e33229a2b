"""The middle of a turn: place it, journal its input, and relay its tokens, each journaled before it is shown."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from holdfast.errors import DeadlineExceeded, NoWorkerAvailable, SessionReleased, TurnFailed
from holdfast.v1 import worker_pb2
from holdfast.wire import error_from_code
from router.config import RouterConfig
from router.fleet.fleet import Fleet
from router.fleet.inbox import TurnInbox
from router.journal.interface import Journal
from router.metrics import Metrics
from router.text import OutputText, TextCodec
from router.turns.dispatch import Dispatch
from router.turns.prepare import prepare_turn
from router.turns.sessions import Sessions
from router.turns.turn import LiveTurn, TurnChunk


class Relay:
    """Relays one router's turns from their workers to their clients."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        journal: Journal,
        codec: TextCodec,
        sessions: Sessions,
        dispatch: Dispatch,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._journal = journal
        self._codec = codec
        self._sessions = sessions
        self._dispatch = dispatch
        self._metrics = metrics

    async def chunks(self, turn: LiveTurn, *, resume_from: int | None = None) -> AsyncGenerator[TurnChunk, None]:
        """The turn's output, through any number of failovers. The last chunk has ``finish_reason``.

        ``resume_from``: the turn was begun by another router; first shows the journal's output from there.
        """
        sampling, started = turn.request.sampling, time.monotonic()
        output = self._codec.stream(sampling)
        if resume_from is None:
            await self._begin(turn)
        else:
            yield _known_output(turn, output, resume_from)
            await self._dispatch.place(turn)
        inbox = self._dispatch.submit(turn, full=resume_from is not None)
        last_token_at, trace = None, turn.request.trace
        trace.enter("prefill")
        while True:
            if turn.abort_requested:
                yield TurnChunk(turn.prompt_len, turn.cached_len or 0, finish_reason="abort")
                return
            update = await self._next_update(turn, inbox, started)
            if update is None or update.needs_history or update.error_code:
                if not turn.abort_requested:
                    inbox = await self._recover(turn, update)
                continue
            try:
                chunk = await self._journal_update(turn, update)
            except SessionReleased:
                # The session was released under the turn.
                turn.abort_requested = True
                continue
            chunk.text = output.push(chunk.tokens, chunk.matched)
            if chunk.finish_reason:
                chunk.text += output.finish(chunk.matched if isinstance(chunk.matched, str) else None)
                self._metrics.turns.labels(chunk.finish_reason).inc()
                trace.note(
                    finish_reason=chunk.finish_reason,
                    prompt_tokens=chunk.prompt_len,
                    cached_tokens=chunk.cached_len,
                    completion_tokens=turn.num_output,
                    worker=turn.worker.name,
                )
            if chunk.tokens:
                if last_token_at is None or turn.resubmitted_at is not None:
                    trace.enter("decode")
                now = time.monotonic()
                self._observe(turn, len(chunk.tokens), now, last_token_at, started)
                last_token_at = now
            yield chunk
            if chunk.finish_reason:
                return

    async def _begin(self, turn: LiveTurn) -> None:
        """Place the turn, and journal its input."""
        session = turn.session
        if session is None:
            await self._dispatch.place(turn)
            return

        async def begin() -> None:
            if turn.epoch != session.record.epoch:  # another router had the session since
                turn.reprepared(await prepare_turn(turn.request, session, self._fleet))
            await self._dispatch.place(turn)
            with turn.request.trace.step("journal"):
                await self._journal.begin_turn(
                    session.session_id,
                    turn.epoch,
                    turn.request.turn_id,
                    turn.keep_len,
                    turn.tokens[turn.keep_len :],
                    turn.request.sampling.SerializeToString(),
                )

        await self._sessions.up_to_date(session, begin, queue=turn.request.queue)

    async def _next_update(self, turn: LiveTurn, inbox: TurnInbox, started: float) -> worker_pb2.TurnUpdate | None:
        while True:
            left_s = started + self._config.turn_deadline_s - time.monotonic()
            try:
                return await inbox.get(min(self._config.token_timeout_s, left_s))
            except TimeoutError:
                if left_s <= self._config.token_timeout_s:
                    raise DeadlineExceeded(f"the turn was not done within {self._config.turn_deadline_s} s") from None
                # A turn that yields, or whose worker is paused, waits for as long as it takes.
                if not (turn.request.sampling.background or turn.worker.stats.paused):
                    raise DeadlineExceeded(f"no token arrived within {self._config.token_timeout_s} s") from None

    async def _recover(self, turn: LiveTurn, update: worker_pb2.TurnUpdate | None) -> TurnInbox:
        """Submit the turn again, to the same worker or another. ``update``: None if the worker was lost."""
        if update is None:
            turn.num_failovers += 1
            if turn.num_failovers > self._config.max_failovers:
                raise TurnFailed(f"the turn failed over {self._config.max_failovers} times without producing a token")
            return await self._dispatch.fail_over(turn)
        if update.needs_history:
            return self._dispatch.submit(turn, full=True)
        if update.error_code == NoWorkerAvailable.code:
            # The worker drains. Known now, before its next beat: it must not be chosen again.
            turn.worker.stats.draining = True
            return await self._dispatch.fail_over(turn)
        error = error_from_code(update.error_code, update.error_message)
        error.param = update.error_param or None
        raise error

    async def _journal_update(self, turn: LiveTurn, update: worker_pb2.TurnUpdate) -> TurnChunk:
        """Journal an update; only then may its tokens be shown (law L10). Raises SessionReleased."""
        index, tokens = turn.num_output, list(update.tokens)
        if turn.session is not None and tokens:
            await self._journal.append(
                turn.session.session_id, turn.epoch, turn.request.turn_id, len(turn.tokens), tokens
            )
        turn.tokens.extend(tokens)
        turn.num_scored += len(update.input_logprobs)
        if update.HasField("cached_len"):
            self._count_recomputed(turn, update.cached_len)
            if turn.cached_len is None:
                turn.cached_len = update.cached_len
        if update.HasField("speculation"):
            turn.speculated(update.speculation)
        if update.finish_reason in ("stop", "length"):
            await self._complete(turn, update.finish_reason)
        matched = update.WhichOneof("matched")
        return TurnChunk(
            prompt_len=turn.prompt_len,
            cached_len=turn.cached_len or 0,
            index=index,
            tokens=tokens,
            logprobs=list(update.logprobs),
            input_logprobs=list(update.input_logprobs),
            finish_reason=update.finish_reason,
            matched=getattr(update, matched) if matched else None,
            speculation=turn.speculation,
        )

    def _count_recomputed(self, turn: LiveTurn, cached_len: int) -> None:
        """The present submission found so many tokens of its history."""
        # The last token's KV is not computed until the next one is.
        count, turn.history_len = max(0, turn.history_len - 1 - cached_len), 0
        if count:
            lost = turn.resubmitted_at is not None
            self._metrics.recomputed.labels("failover" if lost else "moved" if turn.moved else "evicted").inc(count)

    async def _complete(self, turn: LiveTurn, finish: str) -> None:
        """Make the turn's tokens the session's."""
        self._dispatch.completed(turn)
        session = turn.session
        if session is None:
            return
        await self._journal.complete_turn(session.session_id, turn.epoch, turn.request.turn_id, finish)
        added = turn.tokens[turn.keep_len :]
        session.cut(turn.keep_len)
        session.extend(added, self._codec.decode(added))
        session.record.num_turns += 1

    def _observe(self, turn: LiveTurn, count: int, now: float, last_token_at: float | None, started: float) -> None:
        if turn.resubmitted_at is not None:
            self._metrics.failover.labels("first_token").observe(now - turn.resubmitted_at)
            turn.resubmitted_at = None
        turn.num_failovers = 0
        self._metrics.observe_tokens(count, now - (last_token_at or started), last_token_at is None)


def _known_output(turn: LiveTurn, output: OutputText, start: int) -> TurnChunk:
    """The output of a resumed turn so far, from token ``start`` on."""
    known = turn.tokens[turn.prompt_len :]
    before = output.push(known[:start])
    text = output.push(known[start:])
    return TurnChunk(turn.prompt_len, index=start, tokens=list(known[start:]), text=text, text_before=before)
