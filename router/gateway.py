"""Turns, end to end: place, journal, submit, relay, and go on elsewhere when a worker dies.

Every face (OpenAI, SGLang, gRPC) makes a ``TurnRequest`` and iterates over ``Gateway.run``.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from holdfast.errors import (
    DeadlineExceeded,
    HoldfastError,
    InvalidRequest,
    NoWorkerAvailable,
    PromptTooLong,
    QueueFull,
    SessionBusy,
    SessionNotFound,
    SessionReleased,
    StaleEpoch,
)
from holdfast.tokens import pack_tokens
from holdfast.v1 import session_pb2, worker_pb2
from holdfast.wire import error_from_code
from router.config import RouterConfig
from router.control import Control
from router.journal import Journal
from router.metrics import Metrics
from router.moves import Moves
from router.placement import Placement
from router.sessions import Session, Sessions
from router.text import TextCodec
from router.workers import TurnInbox, WorkerAddress, WorkerLink

log = logging.getLogger("holdfast.router")

Prepare: TypeAlias = "Callable[[Session | None], Awaitable[tuple[int, array[int]]]]"
"""Given the session as it is now, which no other turn can change meanwhile: (how many of its tokens to
keep, the turn's input after them)."""


@dataclass(slots=True)
class TurnRequest:
    """One turn, whatever protocol it came by."""

    tenant: str
    prepare: Prepare
    sampling: session_pb2.Sampling
    session_id: str = ""
    """Empty: no session; the request stands alone and leaves nothing but cached prefixes."""
    create_session: bool = True
    queue: bool = True
    """Wait for the session's running turn; off: refuse."""
    cache_key: str = ""
    turn_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    rolled_back: Callable[[], Awaitable[None]] | None = None
    """Called when the turn did not end well and the journal has forgotten it, by this router's doing."""


@dataclass(slots=True)
class TurnChunk:
    """News of a turn. The last one has ``finish_reason``."""

    prompt_len: int
    cached_len: int = 0
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[session_pb2.TokenLogprob] = field(default_factory=list)
    input_logprobs: list[session_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    matched: int | str | None = None


@dataclass(slots=True)
class _Live:
    """A turn under way. ``tokens`` is the whole sequence: kept history, input, output so far."""

    request: TurnRequest
    session: Session | None
    keep_len: int
    tokens: array[int]
    prompt_len: int
    epoch: int = 0
    link: WorkerLink | None = None
    submission: str = ""
    """The turn's name on its worker: another for each time it is sent, for what was sent on a stream that
    broke, and what came of it, may arrive late."""
    cached_len: int | None = None
    resubmitted_at: float | None = None
    """When the turn was sent to another worker, until its next token came."""

    @property
    def key(self) -> str:
        """The name of its slot on the worker."""
        return self.session.session_id if self.session else f"turn-{self.submission}"


class Gateway:
    """The router's core. One per router process."""

    def __init__(self, config: RouterConfig, journal: Journal, codec: TextCodec, metrics: Metrics) -> None:
        self.config = config
        self.codec = codec
        self.metrics = metrics
        self.journal = journal
        self.sessions = Sessions(journal, config.max_queued_turns_per_session, config.token_timeout_s)
        self._placement = Placement()
        self._links: dict[str, WorkerLink] = {}
        self._live: dict[str, _Live] = {}
        self._aborted: set[str] = set()
        self._num_turns = 0
        self._turns_of: Counter[str] = Counter()
        self._background: set[asyncio.Task[None]] = set()
        self.control = Control(self)
        self.moves = Moves(self)

    # ---- workers ------------------------------------------------------------------------------------

    async def set_workers(self, addresses: list[WorkerAddress]) -> None:
        """The workers there are now; another incarnation replaces the one before."""
        wanted = {address.name: address for address in addresses}
        for name in [name for name in self._links if name not in wanted]:
            link = self._links.pop(name)
            self._placement.forget(name)
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
        if request.turn_id in self._live:
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
        turn = _Live(request, session, known.keep_len, tokens, known.prompt_len, epoch=known.session.epoch)
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

    def _shown_again(self, turn: _Live, start: int, finish: str) -> TurnChunk:
        """What a client has not seen of a turn that has ended."""
        output, stops = self.codec.stream(turn.request.sampling.stop), turn.request.sampling.stop
        tokens = turn.tokens[turn.prompt_len :]
        output.push(tokens[:start])
        text = output.push(tokens[start:])
        whole = self.codec.decode(tokens)
        text += output.finish(next((stop for stop in stops if finish == "stop" and stop in whole), None))
        return TurnChunk(turn.prompt_len, index=start, tokens=list(tokens[start:]), text=text, finish_reason=finish)

    async def _run_live(self, turn: _Live, relay: AsyncGenerator[TurnChunk, None]) -> AsyncGenerator[TurnChunk, None]:
        """Pass a turn's chunks on, and end it with the last of them, or however it ends."""
        request = turn.request
        self._live[request.turn_id] = turn
        ended = None
        try:
            async with aclosing(relay):
                async for chunk in relay:
                    if chunk.finish_reason:
                        # Before the client knows: its next turn must find the session free.
                        completed = chunk.finish_reason in ("stop", "length")
                        ended = self._in_background(self._end(turn, completed=completed))
                        await asyncio.shield(ended)
                    yield chunk
        except HoldfastError:
            ended = ended or self._in_background(self._end(turn, completed=False))
            await asyncio.shield(ended)
            raise
        finally:
            if ended is None:
                # The client may be gone and this task cancelled: the clean-up is a task of its own.
                self._in_background(self._end(turn, completed=False))

    def abort(self, turn_id: str) -> bool:
        """End a live turn with reason ``abort``. Returns whether there was one."""
        turn = self._live.get(turn_id)
        if turn is None:
            return False
        self._aborted.add(turn_id)
        if turn.link is not None:
            turn.link.interrupt(turn.submission)
        return True

    def live_turns(self, tenant: str | None = None) -> list[str]:
        """Ids of the turns that run or wait here; only a tenant's, if one is given."""
        return [turn_id for turn_id, turn in self._live.items() if tenant in (None, turn.request.tenant)]

    async def _prepared(self, request: TurnRequest, session: Session | None) -> _Live:
        if session is None:
            return await self._prepare(request, session)
        return await self.sessions.up_to_date(session, lambda: self._prepare(request, session), queue=request.queue)

    async def _prepare(self, request: TurnRequest, session: Session | None) -> _Live:
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
        return _Live(request, session, keep_len, tokens, len(tokens), epoch=session.record.epoch if session else 0)

    async def _relay(self, turn: _Live, *, resumed_at: int | None = None) -> AsyncGenerator[TurnChunk, None]:
        request, started = turn.request, time.monotonic()
        output = self.codec.stream(request.sampling.stop)
        if resumed_at is None:
            await self._begin(turn)
        else:
            known = turn.tokens[turn.prompt_len :]
            output.push(known[:resumed_at])
            text = output.push(known[resumed_at:])
            yield TurnChunk(turn.prompt_len, index=resumed_at, tokens=list(known[resumed_at:]), text=text)
            await self._place(turn)
        inbox = self._submit(turn, full=resumed_at is not None)
        last_token_at = None
        while True:
            if request.turn_id in self._aborted:
                yield TurnChunk(turn.prompt_len, turn.cached_len or 0, finish_reason="abort")
                return
            update = await self._next_update(inbox, started)
            if update is None:
                if request.turn_id in self._aborted:
                    continue
                inbox = await self._fail_over(turn)
                continue
            if update.needs_history:
                inbox = self._submit(turn, full=True)
                continue
            if update.error_code == NoWorkerAvailable.code:
                inbox = await self._fail_over(turn)  # it drains
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
                self.metrics.saw_tokens(len(chunk.tokens), now - (last_token_at or started), last_token_at is None)
                last_token_at = now
            if chunk.finish_reason:
                self.metrics.turns.labels(chunk.finish_reason).inc()
            yield chunk
            if chunk.finish_reason:
                return

    async def _begin(self, turn: _Live) -> None:
        """Find the turn a worker, and journal its input."""
        session = turn.session
        if session is None:
            await self._place(turn)
            return

        async def begin() -> None:
            if turn.epoch != session.record.epoch:  # it was another's since: the turn follows what it is now
                now = await self._prepare(turn.request, session)
                turn.keep_len, turn.tokens, turn.prompt_len = now.keep_len, now.tokens, now.prompt_len
                turn.epoch = now.epoch
            await self._place(turn)
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

    async def _take(self, turn: _Live, update: worker_pb2.TurnUpdate) -> TurnChunk:
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

    async def _complete(self, turn: _Live, finish: str) -> None:
        assert turn.link is not None
        self._placement.remember(turn.link.name, turn.request.tenant, turn.tokens, turn.request.cache_key)
        session = turn.session
        if session is None:
            return
        await self.journal.complete_turn(session.session_id, turn.epoch, turn.request.turn_id, finish)
        added = turn.tokens[turn.keep_len :]
        session.cut(turn.keep_len)
        session.extend(added, self.codec.decode(added))
        session.record.num_turns += 1

    async def _end(self, turn: _Live, *, completed: bool) -> None:
        """What every turn goes through at its end, however it ended."""
        turn_id, session = turn.request.turn_id, turn.session
        del self._live[turn_id]
        self._aborted.discard(turn_id)
        self._give_place(turn.request.tenant)
        if turn.link is not None:
            turn.link.abort(turn.submission)
        if session is not None and not completed:
            await self._roll_back(turn, session)
        elif session is not None:
            self.sessions.give_slot(session)

    async def _roll_back(self, turn: _Live, session: Session) -> None:
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
            # Not known whether the journal has the turn: ask it again the next time.
            log.warning("session %s: could not roll back turn: %s", session.session_id, error.message)
            self.sessions.forget(session.session_id)
        finally:
            self.sessions.give_slot(session)

    # ---- placement and failover ---------------------------------------------------------------------

    async def _place(self, turn: _Live, *, move: bool = False) -> None:
        """Find the turn's worker: where its session is pinned, or (``move``: always) a place that is
        journaled under a new epoch."""
        pinned = self._links.get(turn.session.record.worker) if turn.session else None
        if pinned is not None and pinned.alive and not pinned.stats.draining and not move:
            turn.link = pinned
            return
        turn.link = await self._choose(turn)
        if turn.session is not None:
            record = turn.session.record
            record.epoch = turn.epoch = await self.journal.pin(turn.session.session_id, turn.epoch, turn.link.name)
            left, record.worker = self.link(record.worker), turn.link.name
            if left is not None and left is not turn.link:
                self.control.sweep(left)

    async def _choose(self, turn: _Live) -> WorkerLink:
        deadline = time.monotonic() + self.config.worker_wait_s
        while True:
            # Counted here, not by the link: a turn counts from the moment it is placed.
            load = Counter(live.link for live in self._live.values())
            views = [link.view(load[link]) for link in self.alive_links() if not link.stats.draining]
            name = self._placement.choose(views, turn.request.tenant, turn.tokens, turn.request.cache_key)
            if name is not None:
                return self._links[name]
            if time.monotonic() >= deadline:
                raise NoWorkerAvailable(f"no worker came to life within {self.config.worker_wait_s} s")
            await asyncio.sleep(0.02)

    async def _fail_over(self, turn: _Live) -> TurnInbox:
        """The turn's worker is gone: give the session another owner and replay what the journal has."""
        assert turn.link is not None
        lost, began = turn.link.name, time.monotonic()
        turn.link = None
        await self._place(turn, move=True)
        assert turn.link is not None
        self.metrics.failovers.inc()
        inbox = self._submit(turn, full=True)
        turn.resubmitted_at = time.monotonic()
        self.metrics.failover.labels("place").observe(turn.resubmitted_at - began)
        log.warning(
            "turn %s of session %s moved from %s to %s at token %d in %.1f ms",
            turn.request.turn_id,
            turn.request.session_id or "-",
            lost,
            turn.link.name,
            len(turn.tokens),
            1000 * (time.monotonic() - began),
        )
        return inbox

    def _submit(self, turn: _Live, *, full: bool) -> TurnInbox:
        """Send the turn: only what is new if its worker should have the rest, else everything."""
        assert turn.link is not None
        session = turn.session
        delta = not full and session is not None and turn.keep_len > 0
        prefix_len = turn.keep_len if delta else 0
        turn.submission = f"{turn.request.turn_id}/{uuid.uuid4().hex}"
        submit = worker_pb2.Submit(
            turn_id=turn.submission,
            session_id=turn.key,
            tenant=turn.request.tenant,
            epoch=turn.epoch,
            tokens=pack_tokens(turn.tokens[prefix_len:]),
            prefix_len=prefix_len,
            prefix_crc=session.prefix_crc(prefix_len) if session and delta else 0,
            prompt_len=turn.prompt_len,
            sampling=turn.request.sampling,
            ephemeral=session is None,
        )
        return turn.link.submit(submit)

    def is_busy(self, session_id: str) -> bool:
        return bool(self.sessions.running_turn(session_id))

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def _resumed(session: Session | None) -> tuple[int, array[int]]:
    raise StaleEpoch("another router went on with this turn")
