"""Clients that know the output of a fault-free cluster, and check every token."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

import grpc

from holdfast.errors import (
    DeadlineExceeded,
    HoldfastError,
    JournalUnavailable,
    NoWorkerAvailable,
    QueueFull,
    SessionBusy,
    SessionNotFound,
    StaleEpoch,
    TurnFailed,
    TurnNotFound,
)
from holdfast.v1 import session_pb2, session_pb2_grpc
from holdfast.wire import CODE_KEY, error_from_rpc
from tests.simulation.client_turn import ClientTurn
from tests.simulation.cluster import Cluster
from tests.simulation.loop import Process
from tests.simulation.model import VOCABULARY

PATIENCE_S = 90.0
"""No turn may take longer, whatever happens: every wait inside has a deadline far below."""
TOKEN_PATIENCE_S = 4.0
HANG_S = 20.0
"""Longer than a router waits for a token: one that waits for a worker that it has lost says so by then."""
MAX_HISTORY = 60
"""Longer sessions are rewound: two turns more must fit the context."""
RETRY = (QueueFull, SessionBusy, NoWorkerAvailable, JournalUnavailable, DeadlineExceeded, StaleEpoch, TurnFailed)


class RouterLost(Exception):
    """The call ended without a word of Holdfast's."""


class Client:
    """One session and the one client that uses it. ``history``: what the session must hold."""

    def __init__(self, cluster: Cluster, name: str, rng: random.Random) -> None:
        self.cluster, self.name, self.rng = cluster, name, rng
        self.process = Process(f"client {name}", f"client-{name}")
        self.history: list[int] = []
        self.exists = False
        self.released = False
        self.num_turns = self.num_tokens = 0
        self._stubs: dict[str, Any] = {}

    # ---- what it does -------------------------------------------------------------------------------

    async def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            await asyncio.sleep(self.rng.choice((0.0, 0.05, 0.5, 2.0)))
            if self.released:
                await self.knock()
                continue
            kinds = {self.turn: 12, self.rewind: 2, self.leave: 2, self.cut: 1, self.fork: 1, self.race: 1}
            if self.exists:
                kinds[self.release] = 1
            act = self.rng.choices(list(kinds), list(kinds.values()))[0]
            if not self.history and act in (self.rewind, self.cut, self.fork):
                act = self.turn
            await act()

    async def turn(self, keep_len: int | None = None) -> None:
        """A turn, until it is done, whatever happens on the way."""
        turn = self._new_turn(keep_len)
        deadline = self._now() + PATIENCE_S
        while not turn.done:
            if self._now() > deadline:
                self.cluster.violated(f"L13: {self.name}: turn {turn.id} is not done after {PATIENCE_S} s")
                return
            await self._attempt(turn)
        self._keep(turn)

    async def rewind(self) -> None:
        await self.turn(self.rng.randrange(min(len(self.history), MAX_HISTORY)))

    async def leave(self) -> None:
        """Begin a turn and hang up in it: it is rolled back, or it was done already."""
        turn = self._new_turn(None)
        turn.leaves_at = self.rng.randrange(0, 4)
        await self._attempt(turn)
        if turn.done:
            self._keep(turn)
            return
        if turn.excused and self.exists:
            # Its router did not answer, and may end the turn when it wakes up: nothing is settled before that. Without
            # the turn, the session is the same either way.
            request = session_pb2.FreeTailRequest(session_id=self.name, keep_len=len(self.history))
            await self._ask("FreeTail", request)
            return
        await self._settle(turn)

    async def cut(self) -> None:
        keep_len = self.rng.randrange(len(self.history) + 1)
        request = session_pb2.FreeTailRequest(session_id=self.name, keep_len=keep_len)
        if await self._ask("FreeTail", request) is not None:
            del self.history[keep_len:]

    async def fork(self) -> None:
        """Another session from here on; it takes one turn and is released."""
        child = Client(self.cluster, f"{self.name}.{self.num_turns}", self.rng)
        at_len = self.rng.randrange(1, len(self.history) + 1)
        request = session_pb2.ForkRequest(session_id=self.name, child_id=child.name, at_len=at_len)
        if await self._ask("Fork", request, exists_is_done=True) is None:
            return
        child.history, child.exists = self.history[:at_len], True
        await child.turn()
        await child.release()
        self.num_turns, self.num_tokens = self.num_turns + child.num_turns, self.num_tokens + child.num_tokens

    async def release(self) -> None:
        answer = await self._ask("Release", session_pb2.ReleaseRequest(session_id=self.name))
        if answer is not None:
            self.released = True
            if answer.pages_freed:
                self.cluster.check_released(self.name)

    async def knock(self) -> None:
        """A released session stays gone, whatever is asked of it (law L12)."""
        for method, request in (
            ("Get", session_pb2.GetRequest(session_id=self.name)),
            ("Open", session_pb2.OpenRequest(session_id=self.name)),
            ("Fork", session_pb2.ForkRequest(session_id=self.name, child_id=f"{self.name}-again")),
        ):
            try:
                await getattr(self._stub(), method)(request, timeout=5.0)
            except grpc.aio.AioRpcError:
                continue
            self.cluster.violated(f"L12: {self.name} was released, and {method} finds it")

    async def race(self) -> None:
        """Two turns at once through two routers: both are done, one after the other, or one is refused."""
        turns = [self._new_turn(None), self._new_turn(None)]
        if len(self.history) > MAX_HISTORY // 3:
            await self.turn()
            return
        for turn in turns:
            turn.checks = False
        await asyncio.gather(*(self._attempt(turn) for turn in turns))
        for turn in turns:
            if not turn.done:
                await self._ask_again(turn)
        await self._settle_race(turns)

    # ---- how ----------------------------------------------------------------------------------------

    def _new_turn(self, keep_len: int | None) -> ClientTurn:
        if keep_len is None and len(self.history) >= MAX_HISTORY:
            keep_len = MAX_HISTORY // 3
        kept = self.history if keep_len is None else self.history[:keep_len]
        count = self.rng.choice((1, 2, 5, 20))
        given = [self.rng.randrange(VOCABULARY) for _ in range(count)]
        turn = ClientTurn(f"{self.name}-{self.rng.getrandbits(40):x}", keep_len, given, self.rng.choice((1, 3, 8, 24)))
        turn.seed = self.rng.getrandbits(30)
        turn.expected = turn.output_after(list(kept) + given)
        return turn

    async def _attempt(self, turn: ClientTurn) -> None:
        """One call for the turn; then it is done, or not, or to be asked for again."""
        try:
            await self._stream(turn)
        except RouterLost:
            turn.resumes = True
        except TurnNotFound:
            if turn.seen and not turn.excused and turn.leaves_at is None and turn.checks:
                self.cluster.violated(f"L10: {turn.id} was shown {len(turn.seen)} tokens, and is not found")
            turn.seen.clear()
            turn.resumes = False
        except RETRY as error:
            self.cluster.trace(f"{turn.id} gets {error.code}: {error.message}")
            if error.message.startswith("no token came"):
                self.cluster.violated(f"L13: {turn.id}: {error.message}, and nobody went on with it")
            if isinstance(error, StaleEpoch) and not self.cluster.disturbed:
                self.cluster.violated(f"L11: {turn.id}: {error.message}, and that is no fault of its client")
            # The turn has stopped. The next attempt asks for what the journal has of it.
            turn.resumes = True
            await asyncio.sleep(self.rng.uniform(0.05, 0.5))
        except SessionNotFound as error:
            if self.exists and turn.checks:
                self.cluster.violated(f"L10: {turn.id}: {error.message}, but it exists")
            turn.resumes = False
            await asyncio.sleep(0.05)

    async def _stream(self, turn: ClientTurn) -> None:
        request = session_pb2.GenerateRequest(session_id=self.name, request_id=turn.id)
        if turn.resumes:
            request.resume_from = len(turn.seen)
        else:
            request.tokens.ids.extend(turn.input)
            request.sampling.CopyFrom(turn.sampling())
            if turn.keep_len is not None:
                request.rewind_to = turn.keep_len
        call = self._stub().Generate(request)
        how = f"resumes at {len(turn.seen)}" if turn.resumes else f"+{len(turn.input)} tokens, wants {turn.max_tokens}"
        self.cluster.trace(f"{turn.id}: {how}, by {call.down.source.name}")
        patience_s = TOKEN_PATIENCE_S
        try:
            while True:
                try:
                    async with asyncio.timeout(patience_s):
                        chunk = await call.read()
                except TimeoutError:
                    if patience_s < HANG_S and self.cluster.waits_for_a_lost_worker(turn.id):
                        patience_s = HANG_S  # leaving would hide it
                        continue
                    turn.excused = True  # the router will see this client leave
                    raise RouterLost from None
                except grpc.aio.AioRpcError as error:
                    raise _meaning(error) from None
                if chunk is grpc.aio.EOF:
                    raise RouterLost
                if turn.resumes:
                    turn.excused = False  # another router has taken it
                self._take(turn, chunk)
                if chunk.finish_reason == "abort":
                    if turn.checks:
                        self.cluster.violated(f"L10: {turn.id} was aborted after {turn.seen}, and nobody asked for it")
                    turn.excused = turn.resumes = True
                    return
                if chunk.finish_reason:
                    self.cluster.trace(f"{turn.id}: {chunk.finish_reason} after {turn.seen}")
                    turn.done = True
                    return
                if turn.leaves_at is not None and len(turn.seen) >= turn.leaves_at:
                    self.cluster.trace(f"{turn.id}: its client leaves after {turn.seen}")
                    return
        finally:
            call.cancel()

    def _take(self, turn: ClientTurn, chunk: session_pb2.GenerateResponse) -> None:
        if not chunk.tokens:
            return
        if chunk.index != len(turn.seen):
            self.cluster.violated(f"L10: {turn.id} was sent token {chunk.index} after {len(turn.seen)}")
        turn.seen[chunk.index :] = chunk.tokens
        self.num_tokens += len(chunk.tokens)
        if turn.checks and turn.seen != turn.expected[: len(turn.seen)]:
            self.cluster.violated(f"L10: {turn.id} was sent {turn.seen}, right is {turn.expected}")

    def _keep(self, turn: ClientTurn) -> None:
        if turn.seen != turn.expected:
            self.cluster.violated(f"L10: {turn.id} ended with {turn.seen}, right is {turn.expected}")
        if turn.keep_len is not None:
            del self.history[turn.keep_len :]
        self.history += turn.input + turn.seen
        self.exists = True
        self.num_turns += 1

    async def _settle(self, turn: ClientTurn) -> None:
        """After leaving: the session is at its last good turn, which may be this one."""
        length = await self._length()
        if length is None:
            return
        self.exists = True
        if turn.keep_len is not None and length != len(self.history):
            del self.history[turn.keep_len :]
        whole = self.history + turn.input + turn.expected
        if length == len(whole):
            self.history = whole
        elif length != len(self.history):
            self.cluster.violated(f"L10: {self.name} has {length} tokens, not {len(self.history)} or {len(whole)}")

    async def _settle_race(self, turns: list[ClientTurn]) -> None:
        """What the session may be now: with all turns that are done, in some order, and perhaps with those whose
        end is unknown (only the last can be asked for)."""
        done = [turn for turn in turns if turn.done]
        orders = [order for n in range(len(done), len(turns) + 1) for order in itertools.permutations(turns, n)]
        after = [self._after(order) for order in orders if all(turn in order for turn in done)]
        histories = [history for history in after if history is not None]
        if not histories:
            self.cluster.violated(f"L10: {self.name}: racing turns gave {[t.seen for t in turns]}")
            return
        self.num_turns += len(done)
        self.exists |= bool(done)
        if len(done) == len(turns):
            self.history = histories[0]
            return
        length = await self._length()
        self.exists |= length is not None
        histories = [history for history in histories if len(history) == (length or 0)]
        if not histories:
            self.cluster.violated(f"L10: {self.name} has {length} tokens after a race")
        elif len(histories) == 1:
            self.history = histories[0]
        else:
            # Which of them it is, the next turn's tokens would tell: ask for a clean start.
            del self.history[:]
            await self._ask("FreeTail", session_pb2.FreeTailRequest(session_id=self.name, keep_len=0))

    def _after(self, order: Sequence[ClientTurn]) -> list[int] | None:
        """The history after these turns, one after another; None: that is not what their clients saw."""
        history = list(self.history)
        for turn in order:
            history += turn.input
            output = turn.output_after(history)
            if turn.seen != output[: len(turn.seen)] or (turn.done and len(turn.seen) < len(output)):
                return None
            history += output
        return history

    async def _ask_again(self, turn: ClientTurn) -> None:
        """Whether a turn that ended in an error is done after all."""
        turn.resumes = True
        deadline = self._now() + PATIENCE_S
        while turn.resumes and not turn.done and self._now() < deadline:
            await self._attempt(turn)
            await asyncio.sleep(0.05)

    async def _length(self) -> int | None:
        """How many tokens the session has; None if it was never created. Asks until a router answers."""
        await asyncio.sleep(0.5)  # a router that was left has had a moment to see it
        answer = await self._ask("Get", session_pb2.GetRequest(session_id=self.name))
        return answer.num_tokens if answer is not None else None

    async def _ask(self, method: str, request: Any, *, exists_is_done: bool = False) -> Any:
        """A unary call, asked again until there is an answer; None: the session does not exist."""
        deadline = self._now() + PATIENCE_S
        while self._now() < deadline:
            try:
                answer = await getattr(self._stub(), method)(request, timeout=8.0)
                self.cluster.trace(f"{self.name}: {method} {f'{request} gives {answer}'.replace(chr(10), ' ')}")
                return answer
            except grpc.aio.AioRpcError as rpc_error:
                try:
                    raise _meaning(rpc_error) from None
                except SessionNotFound as error:
                    if self.exists and method != "Release":
                        self.cluster.violated(f"L10: {method}: {error.message}, but it exists")
                    return None
                except HoldfastError as error:
                    if exists_is_done and error.code == "session_exists":
                        return error
                    if not isinstance(error, RETRY):
                        self.cluster.violated(f"{method} of {self.name} is refused: {error.message}")
                        return None
                except RouterLost:
                    pass
            await asyncio.sleep(self.rng.uniform(0.05, 0.5))
        self.cluster.violated(f"L13: {method} of {self.name} is not done after {PATIENCE_S} s")
        return None

    def _stub(self) -> Any:
        address = self.rng.choice(self.cluster.routers).address
        if address not in self._stubs:
            channel: Any = self.cluster.network.channel(address)
            self._stubs[address] = session_pb2_grpc.SessionServiceStub(channel)
        return self._stubs[address]

    def _now(self) -> float:
        return self.cluster.loop.time()


def _meaning(error: grpc.aio.AioRpcError) -> Exception:
    trailing = error.trailing_metadata() or ()
    if any(key == CODE_KEY for key, _ in trailing) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return error_from_rpc(error)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return RouterLost()
    return AssertionError(f"a call failed with {error.code().name}: {error.details()}")
