"""Turns, end to end: place, journal, submit, relay, and go on elsewhere when a worker dies.

Every face (OpenAI, SGLang, gRPC) makes a ``TurnRequest`` and iterates over ``Gateway.run``.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from holdfast.errors import (
    DeadlineExceeded,
    HoldfastError,
    InvalidRequest,
    JournalUnavailable,
    NoWorkerAvailable,
    PromptTooLong,
    QueueFull,
    SessionBusy,
    SessionNotFound,
    SessionReleased,
    StaleEpoch,
    TurnFailed,
)
from holdfast.v1 import session_pb2, worker_pb2
from holdfast.wire import error_from_code
from router.config import RouterConfig
from router.control import Control
from router.dispatch import Dispatch
from router.journal import Journal
from router.metrics import Metrics
from router.moves import Moves
from router.sessions import Session, Sessions
from router.text import TextCodec
from router.turns import LiveTurn, TurnChunk, TurnRequest
from router.workers import TurnInbox, WorkerAddress, WorkerLink

log = logging.getLogger("holdfast.router")
LEAVE_RETRY_S = 0.5
HANG_UP_S = 1.0
"""Past its deadline a turn that waits for a token is told so; one whose client does not read ends after this."""


class Gateway:
    """The router's core. One per router process."""

    def __init__(self, config: RouterConfig, journal: Journal, codec: TextCodec, metrics: Metrics) -> None:
        self.config = config
        self.codec = codec
        self.metrics = metrics
        self.journal = journal
        self.sessions = Sessions(journal, config.max_queued_turns_per_session, config.token_timeout_s)
        self.dispatch = Dispatch(self)
        self._links: dict[str, WorkerLink] = {}
        self.turns: dict[str, LiveTurn] = {}
        """That run or wait here, by id."""
        self._aborted: set[str] = set()
        self._num_turns = 0
        self._turns_of: Counter[str] = Counter()
        self.closing = False
        """The router is told to stop: turns that do not end by then are left to another."""
        self._background: set[asyncio.Task[None]] = set()
        self.control = Control(self)
        self.moves = Moves(self)

    # ---- workers ------------------------------------------------------------------------------------

    async def set_workers(self, addresses: list[WorkerAddress]) -> None:
        """The workers there are now; another incarnation replaces the one before."""
        wanted = {address.name: address for address in addresses}
        for name in [name for name in self._links if name not in wanted]:
            link = self._links.pop(name)
            self.dispatch.placement.forget(name)
            await link.close()
        for name, address in wanted.items():
            if name not in self._links:
                self._links[name] = WorkerLink(address, self.config.worker_lease_s, self.control.sweep)

    def link(self, name: str) -> WorkerLink | None:
        """The worker that a pin names, if it is alive."""
        link = self._links.get(name)
        return link if link is not None and link.alive else None

    def alive_links(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link.alive]

    @property
    def context_len(self) -> int:
        """The longest sequence that every live worker takes; 0 while none lives."""
        return min((link.welcome.context_len for link in self._links.values() if link.welcome), default=0)

    @property
    def vocab_size(self) -> int:
        return next((link.welcome.vocab_size for link in self._links.values() if link.welcome), 0)

    async def close(self) -> None:
        self.closing = True
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.control.close()
        for link in self._links.values():
            await link.close()

    # ---- turns --------------------------------------------------------------------------------------

    async def run(self, request: TurnRequest) -> AsyncIterator[TurnChunk]:
        """Run a turn. Closing the iterator early aborts it, and the session is as before.

        Raises every HoldfastError that a caller can get; most before the first chunk.
        """
        self._refuse_full(request.tenant)
        if request.turn_id in self.turns:
            raise SessionBusy(f"request {request.turn_id} runs already; resume it, or send another id")
        self._take_place(request.tenant)
        session = None
        try:
            if request.session_id:
                session = await self.sessions.take_slot(
                    request.session_id, request.tenant, create=request.create_session, queue=request.queue
                )
                session.running_turn = request.turn_id
            turn = await self._prepared(request, session)
        except BaseException:
            if session is not None:
                self.sessions.give_slot(session)
            self._give_place(request.tenant)
            raise
        async with aclosing(self._run_live(turn, self._relay(turn))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def resume(self, session_id: str, tenant: str, turn_id: str, start: int) -> AsyncIterator[TurnChunk]:
        """Go on with a turn that another router began, from output token ``start`` on.

        What the journal has comes first, then what is generated; of a turn that has ended, all that is
        left of it. Raises TurnNotFound, SessionBusy while a living router runs it, and as ``run``.
        """
        self._refuse_busy(session_id, tenant)
        known = await self.journal.adopt_turn(session_id, tenant, turn_id)
        self._refuse_busy(session_id, tenant)
        tokens = known.session.tokens[: known.keep_len] + known.tokens
        if not 0 <= start <= len(tokens) - known.prompt_len:
            raise InvalidRequest(f"turn {turn_id} has {len(tokens) - known.prompt_len} tokens, none at {start}")
        session = self.sessions.add(known.session)
        sampling = session_pb2.Sampling.FromString(known.request)
        request = TurnRequest(tenant, _resumed, sampling, session_id, turn_id=turn_id)
        turn = LiveTurn(request, session, known.keep_len, tokens, known.prompt_len, epoch=known.session.epoch)
        if known.finish:
            yield self._shown_again(turn, start, known.finish)
            return
        session.busy, session.running_turn = True, turn_id
        self._take_place(tenant)
        self.metrics.resumed.inc()
        async with aclosing(self._run_live(turn, self._relay(turn, resumed_at=start))) as chunks:
            async for chunk in chunks:
                yield chunk

    def _refuse_full(self, tenant: str) -> None:
        if self._num_turns >= self.config.max_live_turns:
            self.metrics.rejected.inc()
            raise QueueFull(f"{self._num_turns} turns run or wait here; try again later")
        if self._turns_of[tenant] >= self.config.tenant_turns:
            self.metrics.rejected.inc()
            raise QueueFull(f"{self._turns_of[tenant]} turns of yours run or wait here, no more may; try again later")

    def _take_place(self, tenant: str) -> None:
        self._num_turns += 1
        self._turns_of[tenant] += 1

    def _give_place(self, tenant: str) -> None:
        self._num_turns -= 1
        self._turns_of[tenant] -= 1
        if not self._turns_of[tenant]:
            del self._turns_of[tenant]

    def _refuse_busy(self, session_id: str, tenant: str) -> None:
        self._refuse_full(tenant)
        if self.sessions.running_turn(session_id):
            raise SessionBusy(f"session {session_id} already has an active request, here; wait for it or abort it")

    def _shown_again(self, turn: LiveTurn, start: int, finish: str) -> TurnChunk:
        """What a client has not seen of a turn that has ended."""
        sampling = turn.request.sampling
        output = self.codec.stream(sampling.stop, sampling.min_tokens)
        tokens = turn.tokens[turn.prompt_len :]
        output.push(tokens[:start])
        text = output.push(tokens[start:])
        text += output.finish(output.stopped_by if finish == "stop" else None)
        return TurnChunk(turn.prompt_len, index=start, tokens=list(tokens[start:]), text=text, finish_reason=finish)

    async def _run_live(
        self, turn: LiveTurn, relay: AsyncGenerator[TurnChunk, None]
    ) -> AsyncGenerator[TurnChunk, None]:
        """Pass a turn's chunks on, and end it with the last of them, or however it ends."""
        request = turn.request
        self.turns[request.turn_id] = turn
        ended = None
        # While a client does not read, nothing here runs that could see the deadline.
        after_s = self.config.turn_deadline_s + HANG_UP_S
        hang_up = asyncio.get_running_loop().call_later(after_s, self._hang_up, turn, asyncio.current_task())
        try:
            async with aclosing(relay):
                async for chunk in relay:
                    if chunk.finish_reason:
                        # Before the client knows: its next turn must find the session free.
                        completed = chunk.finish_reason in ("stop", "length")
                        ended = self._in_background(self._end(turn, self._give if completed else self._roll_back))
                        await asyncio.shield(ended)
                    yield chunk
        except HoldfastError:
            # The fault is not its client's: what it has seen stays, for it to go on from (law L10).
            ended = ended or self._in_background(self._end(turn, self._leave_shown))
            await asyncio.shield(ended)
            raise
        finally:
            hang_up.cancel()
            if ended is None:
                # The client may be gone and this task cancelled: the clean-up is a task of its own.
                leaves = not self.closing and not turn.overdue
                self._in_background(self._end(turn, self._roll_back if leaves else self._leave_shown))

    def _hang_up(self, turn: LiveTurn, task: asyncio.Task[Any] | None) -> None:
        log.warning("turn %s: its client does not read; it is left", turn.request.turn_id)
        turn.overdue = True
        if task is not None:
            task.cancel()

    def abort(self, turn_id: str) -> bool:
        """End a live turn with reason ``abort``. Returns whether there was one."""
        turn = self.turns.get(turn_id)
        if turn is None:
            return False
        self._aborted.add(turn_id)
        if turn.link is not None:
            turn.link.interrupt(turn.submission)
        return True

    def live_turns(self, tenant: str | None = None) -> list[str]:
        """Ids of the turns that run or wait here; only a tenant's, if one is given."""
        return [turn_id for turn_id, turn in self.turns.items() if tenant in (None, turn.request.tenant)]

    async def _prepared(self, request: TurnRequest, session: Session | None) -> LiveTurn:
        if session is None:
            return await self._prepare(request, session)
        return await self.sessions.up_to_date(session, lambda: self._prepare(request, session), queue=request.queue)

    async def _prepare(self, request: TurnRequest, session: Session | None) -> LiveTurn:
        keep_len, ids = await request.prepare(session)
        tokens = (session.tokens[:keep_len] if session else array("i")) + ids
        if not tokens:
            raise InvalidRequest("the input is empty; it must hold at least one token")
        if self.context_len and len(tokens) >= self.context_len:
            raise PromptTooLong(
                f"the input of {len(tokens)} tokens exceeds the maximum allowed length of {self.context_len - 1} tokens"
            )
        if self.vocab_size and ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise InvalidRequest(f"token ids must be from 0 to {self.vocab_size - 1}")
        if not request.sampling.HasField("seed"):
            # Drawn here, not by the worker, so that a replay elsewhere goes on with the same noise.
            request.sampling.seed = random.getrandbits(62)
        return LiveTurn(request, session, keep_len, tokens, len(tokens), epoch=session.record.epoch if session else 0)

    async def _relay(self, turn: LiveTurn, *, resumed_at: int | None = None) -> AsyncGenerator[TurnChunk, None]:
        request, started = turn.request, time.monotonic()
        output = self.codec.stream(request.sampling.stop, request.sampling.min_tokens)
        if resumed_at is None:
            await self._begin(turn)
        else:
            known = turn.tokens[turn.prompt_len :]
            output.push(known[:resumed_at])
            text = output.push(known[resumed_at:])
            yield TurnChunk(turn.prompt_len, index=resumed_at, tokens=list(known[resumed_at:]), text=text)
            await self.dispatch.place(turn)
        inbox = self.dispatch.submit(turn, full=resumed_at is not None)
        last_token_at = None
        while True:
            if request.turn_id in self._aborted:
                yield TurnChunk(turn.prompt_len, turn.cached_len or 0, finish_reason="abort")
                return
            update = await self._next_update(inbox, started)
            if update is None:
                if request.turn_id in self._aborted:
                    continue
                turn.num_lost += 1
                if turn.num_lost > self.config.max_failovers:
                    raise TurnFailed(f"{turn.num_lost} workers were lost under the turn, with no token from it between")
                inbox = await self.dispatch.fail_over(turn)
                continue
            if update.needs_history:
                inbox = self.dispatch.submit(turn, full=True)
                continue
            if update.error_code == NoWorkerAvailable.code:
                if turn.link is not None:
                    turn.link.stats.draining = True  # before its next beat says so: it is not chosen again
                inbox = await self.dispatch.fail_over(turn)
                continue
            if update.error_code:
                raise error_from_code(update.error_code, update.error_message)
            try:
                chunk = await self._take(turn, update)
                if chunk.finish_reason in ("stop", "length"):
                    await self._complete(turn, chunk.finish_reason)
            except SessionReleased:
                # The tombstone overtook the turn: it is ended, and says so as any ended turn does.
                self._aborted.add(request.turn_id)
                continue
            chunk.text = output.push(chunk.tokens)
            if chunk.finish_reason:
                chunk.text += output.finish(chunk.matched if isinstance(chunk.matched, str) else None)
            now = time.monotonic()
            if chunk.tokens and turn.resubmitted_at is not None:
                self.metrics.failover.labels("first_token").observe(now - turn.resubmitted_at)
                turn.resubmitted_at = None
            if chunk.tokens:
                turn.num_lost = 0
                self.metrics.saw_tokens(len(chunk.tokens), now - (last_token_at or started), last_token_at is None)
                last_token_at = now
            if chunk.finish_reason:
                self.metrics.turns.labels(chunk.finish_reason).inc()
            yield chunk
            if chunk.finish_reason:
                return

    async def _begin(self, turn: LiveTurn) -> None:
        """Find the turn a worker, and journal its input."""
        session = turn.session
        if session is None:
            await self.dispatch.place(turn)
            return

        async def begin() -> None:
            if turn.epoch != session.record.epoch:  # it was another's since: the turn follows what it is now
                now = await self._prepare(turn.request, session)
                turn.keep_len, turn.tokens, turn.prompt_len = now.keep_len, now.tokens, now.prompt_len
                turn.epoch = now.epoch
            await self.dispatch.place(turn)
            await self.journal.begin_turn(
                session.session_id,
                turn.epoch,
                turn.request.turn_id,
                turn.keep_len,
                turn.tokens[turn.keep_len :],
                turn.request.sampling.SerializeToString(),
            )

        await self.sessions.up_to_date(session, begin, queue=turn.request.queue)

    async def _next_update(self, inbox: TurnInbox, started: float) -> worker_pb2.TurnUpdate | None:
        left_s = started + self.config.turn_deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(min(self.config.token_timeout_s, max(0.0, left_s))):
                return await inbox.get()
        except TimeoutError:
            if left_s <= self.config.token_timeout_s:
                raise DeadlineExceeded(f"the turn was not done within {self.config.turn_deadline_s} s") from None
            raise DeadlineExceeded(f"no token came within {self.config.token_timeout_s} s") from None

    async def _take(self, turn: LiveTurn, update: worker_pb2.TurnUpdate) -> TurnChunk:
        """Journal an update, and only then give it to be shown (law L10)."""
        index = len(turn.tokens) - turn.prompt_len
        if turn.session is not None and update.tokens:
            await self.journal.append(
                turn.session.session_id, turn.epoch, turn.request.turn_id, len(turn.tokens), list(update.tokens)
            )
        turn.tokens.extend(update.tokens)
        if turn.cached_len is None and update.HasField("cached_len"):
            turn.cached_len = update.cached_len
        matched = update.WhichOneof("matched")
        return TurnChunk(
            prompt_len=turn.prompt_len,
            cached_len=turn.cached_len or 0,
            index=index,
            tokens=list(update.tokens),
            logprobs=list(update.logprobs),
            input_logprobs=list(update.input_logprobs),
            finish_reason=update.finish_reason,
            matched=getattr(update, matched) if matched else None,
        )

    async def _complete(self, turn: LiveTurn, finish: str) -> None:
        assert turn.link is not None
        self.dispatch.placement.remember(turn.link.name, turn.request.tenant, turn.tokens, turn.request.cache_key)
        session = turn.session
        if session is None:
            return
        await self.journal.complete_turn(session.session_id, turn.epoch, turn.request.turn_id, finish)
        added = turn.tokens[turn.keep_len :]
        session.cut(turn.keep_len)
        session.extend(added, self.codec.decode(added))
        session.record.num_turns += 1

    async def _end(self, turn: LiveTurn, settle: Callable[[LiveTurn, Session], Awaitable[None]]) -> None:
        """What every turn goes through at its end, however it ended; ``settle``: what becomes of its session."""
        turn_id, session = turn.request.turn_id, turn.session
        del self.turns[turn_id]
        self._aborted.discard(turn_id)
        self._give_place(turn.request.tenant)
        if turn.link is not None:
            turn.link.abort(turn.submission)
        if session is not None:
            await settle(turn, session)

    async def _give(self, turn: LiveTurn, session: Session) -> None:
        self.sessions.give_slot(session)

    async def _leave_shown(self, turn: LiveTurn, session: Session) -> None:
        if len(turn.tokens) == turn.prompt_len:
            await self._roll_back(turn, session)
            return
        self.sessions.forget(session.session_id)
        self.sessions.give_slot(session)
        await self._leave(turn, session)

    async def _leave(self, turn: LiveTurn, session: Session) -> None:
        """Let any router go on with the turn, or roll it back; while the journal fails, again and again."""
        try:
            await self.journal.leave_turn(session.session_id, turn.request.turn_id)
        except JournalUnavailable as error:
            log.warning("session %s: its turn is not left yet: %s", session.session_id, error.message)
            self._in_background(self._leave_later(turn, session))
        except (SessionNotFound, SessionReleased):
            pass

    async def _leave_later(self, turn: LiveTurn, session: Session) -> None:
        await asyncio.sleep(LEAVE_RETRY_S)
        if not self.closing and turn.request.turn_id not in self.turns:
            await self._leave(turn, session)

    async def _roll_back(self, turn: LiveTurn, session: Session) -> None:
        try:
            if await self.journal.abort_turn(session.session_id, turn.request.turn_id):
                if turn.request.rolled_back is not None:
                    await turn.request.rolled_back()
            else:
                # Done after all, or another router's by now: what is known here may be out of date.
                self.sessions.forget(session.session_id)
        except (SessionNotFound, SessionReleased):
            pass
        except HoldfastError as error:
            # Not known whether the journal has the turn: ask it again the next time, whoever does.
            log.warning("session %s: could not roll back turn: %s", session.session_id, error.message)
            self.sessions.forget(session.session_id)
            await self._leave(turn, session)
        finally:
            self.sessions.give_slot(session)

    def is_busy(self, session_id: str) -> bool:
        return bool(self.sessions.running_turn(session_id))

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def _resumed(session: Session | None) -> tuple[int, array[int]]:
    raise StaleEpoch("another router went on with this turn")
