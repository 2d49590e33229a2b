"""A turn from its request to its end: admit, lock its session, prepare, relay, settle.

Every API makes a ``TurnRequest`` and iterates over ``Gateway.run``. The turn's life in the order of the
code: ``run`` here, ``prepare_turn``, ``Relay.chunks`` (with ``Dispatch`` for its worker), ``Settler``.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from holdfast.errors import HoldfastError, InvalidRequest, SessionBusy, StaleEpoch
from holdfast.names import scoped
from holdfast.v1 import session_pb2
from router.config import RouterConfig
from router.fleet.fleet import Fleet
from router.journal.interface import Journal
from router.metrics import Metrics
from router.text import TextCodec
from router.tracing import Tracing, TurnTrace
from router.turns.background import BackgroundTasks
from router.turns.live import LiveTurns
from router.turns.prepare import prepare_turn
from router.turns.relay import Relay
from router.turns.sessions import Session, Sessions
from router.turns.settle import Settler
from router.turns.turn import LiveTurn, TurnChunk, TurnRequest

log = logging.getLogger("holdfast.router")
HANG_UP_S = 1.0
"""Past its deadline a turn that waits for a token ends with an error. One whose client does not read is
cut off this much later."""


class Gateway:
    """Runs the turns of one router."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        journal: Journal,
        codec: TextCodec,
        sessions: Sessions,
        live: LiveTurns,
        relay: Relay,
        metrics: Metrics,
        tracing: Tracing | None,
    ) -> None:
        self._tracing = tracing
        self._config = config
        self._fleet = fleet
        self._journal = journal
        self._codec = codec
        self._sessions = sessions
        self._live = live
        self._relay = relay
        self._metrics = metrics
        self._background = BackgroundTasks()
        self._settler = Settler(journal, sessions, live, self._background)

    async def run(self, request: TurnRequest) -> AsyncGenerator[TurnChunk, None]:
        """Run a turn. Closing the iterator early aborts the turn, and the session is as before.

        Raises every HoldfastError that a client can get, most of them before the first chunk.
        """
        self._codec.resolve_stops(request.sampling)
        self._live.refuse_full(request.tenant, background=request.sampling.background)
        self._live.refuse_spent(request.tenant)
        if self._live.has(request.tenant, request.turn_id):
            raise SessionBusy(
                f"Duplicate request ID {request.turn_id}: it is running already; use another, or resume it"
            )
        self._live.count(request.tenant)
        self._trace(request)
        session = None
        try:
            with request.trace.step("admit"):
                if request.session_id:
                    session = await self._sessions.lock(
                        scoped(request.tenant, request.session_id),
                        request.tenant,
                        create=request.create_session,
                        queue=request.queue,
                    )
                    session.running_turn = request.turn_id
                turn = await self._prepare(request, session)
        except BaseException as error:
            if session is not None:
                self._sessions.unlock(session)
            self._live.uncount(request.tenant)
            request.trace.end(error)
            raise
        async with aclosing(self._run(turn, self._relay.chunks(turn))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def resume(self, session_id: str, tenant: str, turn_id: str, start: int) -> AsyncGenerator[TurnChunk, None]:
        """Resume a turn that another router began, from output token ``start`` on.

        Shows the journal's output first, then what is generated; of a turn that has ended, the rest of
        its output. Raises TurnNotFound, SessionBusy while a living router runs the turn, and as ``run``.
        """
        session_id = scoped(tenant, session_id)
        self._refuse_busy(session_id, tenant)
        known = await self._journal.adopt_turn(session_id, tenant, turn_id)
        self._refuse_busy(session_id, tenant)
        tokens = known.session.tokens[: known.keep_len] + known.tokens
        if not 0 <= start <= len(tokens) - known.prompt_len:
            raise InvalidRequest(f"turn {turn_id} has {len(tokens) - known.prompt_len} tokens, none at {start}")
        session = self._sessions.add(known.session)
        sampling = session_pb2.Sampling.FromString(known.request)
        request = TurnRequest(tenant, _not_prepared_again, sampling, session_id, turn_id=turn_id)
        turn = LiveTurn(request, session, known.keep_len, tokens, known.prompt_len, epoch=known.session.epoch)
        if known.finish:
            yield self._rest_of(turn, start, known.finish)
            return
        self._sessions.lock_new(session, turn_id)
        self._live.count(tenant)
        self._trace(request)
        self._metrics.resumed.inc()
        async with aclosing(self._run(turn, self._relay.chunks(turn, resume_from=start))) as chunks:
            async for chunk in chunks:
                yield chunk

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do ``work`` whatever becomes of the caller, which a client that leaves may cancel; ``close`` waits for it."""
        return self._background.start(work)

    async def close(self) -> None:
        """Wait until every turn that has ended is settled."""
        self._live.closing = True
        await self._background.wait()

    def _trace(self, request: TurnRequest) -> None:
        if self._tracing is not None:
            request.trace = TurnTrace(self._tracing, request.turn_id, request.session_id)

    def _refuse_busy(self, session_id: str, tenant: str) -> None:
        self._live.refuse_full(tenant)
        if self._sessions.running_turn(session_id):
            raise SessionBusy(f"session {session_id} has an active request on this router; wait for it or abort it")

    async def _prepare(self, request: TurnRequest, session: Session | None) -> LiveTurn:
        if session is None:
            return await prepare_turn(request, session, self._fleet)
        return await self._sessions.up_to_date(
            session, lambda: prepare_turn(request, session, self._fleet), queue=request.queue
        )

    async def _run(self, turn: LiveTurn, relay: AsyncGenerator[TurnChunk, None]) -> AsyncGenerator[TurnChunk, None]:
        """Pass on a turn's chunks, and settle the turn with the last chunk, or however it ends."""
        self._live.add(turn)
        ended = None
        # While a client does not read, no code of the turn runs that could check its deadline.
        after_s = self._config.turn_deadline_s + HANG_UP_S
        hang_up = asyncio.get_running_loop().call_later(after_s, _hang_up, turn, asyncio.current_task())
        try:
            async with aclosing(relay):
                async for chunk in relay:
                    if chunk.finish_reason:
                        # Settled before the client sees the end: its next turn must find the session unlocked.
                        completed = chunk.finish_reason in ("stop", "length")
                        settle = self._settler.keep if completed else self._settler.roll_back
                        ended = self._background.start(self._end(turn, settle))
                        await asyncio.shield(ended)
                    yield chunk
        except HoldfastError as error:
            turn.request.trace.end(error)
            # Not the client's doing: what the client has seen stays, and can be resumed (law L10).
            ended = ended or self._background.start(self._end(turn, self._settler.keep_shown))
            await asyncio.shield(ended)
            raise
        finally:
            hang_up.cancel()
            if ended is None:
                # The client left, and this task may be cancelled: settle in a task of its own.
                aborted = not self._live.closing and not turn.overdue
                settle = self._settler.roll_back if aborted else self._settler.keep_shown
                self._background.start(self._end(turn, settle))

    async def _end(self, turn: LiveTurn, settle: Callable[[LiveTurn, Session], Awaitable[None]]) -> None:
        """The one way out of a turn, however it ended (law L7)."""
        self._live.remove(turn)
        turn.ended()
        turn.request.trace.end()
        if turn.session is not None:
            await settle(turn, turn.session)

    def _rest_of(self, turn: LiveTurn, start: int, finish: str) -> TurnChunk:
        """The output of an ended turn from token ``start`` on."""
        sampling = turn.request.sampling
        output = self._codec.stream(sampling)
        tokens = turn.tokens[turn.prompt_len :]
        before = output.push(tokens[:start])
        matched: int | str | None = self._codec.stop_token(tokens, sampling) if finish == "stop" else None
        text = output.push(tokens[start:], matched)
        if finish == "stop" and matched is None:
            matched = output.stopped_by
        text += output.finish(matched if isinstance(matched, str) else None)
        return TurnChunk(
            turn.prompt_len,
            index=start,
            tokens=list(tokens[start:]),
            text=text,
            text_before=before,
            finish_reason=finish,
            matched=matched,
        )


def _hang_up(turn: LiveTurn, task: asyncio.Task[Any] | None) -> None:
    log.warning(
        "turn %s: its client does not read; the turn is cut off at its deadline",
        turn.request.turn_id,
        extra=turn.log_fields,
    )
    turn.overdue = True
    if task is not None:
        task.cancel()


async def _not_prepared_again(session: Session | None) -> tuple[int, array[int]]:
    raise StaleEpoch("another router has resumed this turn")
