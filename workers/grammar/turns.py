"""The grammars of a worker's live turns: compiled in threads of their own, never in the step loop's."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

from holdfast.errors import InvalidRequest
from workers.grammar.compiler import GrammarCompiler
from workers.grammar.matcher import Matcher
from workers.grammar.stop_patterns import StopPatterns
from workers.scheduling import Grammar, Turn, Work

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

Masks: TypeAlias = dict[str, list[bytes]]

NO_TOKENS = array("i")
MAX_CACHED = 256
"""Compiled grammars: agents send the same few with each request."""
NUM_THREADS = 2
"""One slow grammar does not delay the others."""
MAX_FORCED_BYTES = 1024
"""Text that must come next and is longer is not looked at until less of it is left: its tokens would take too long."""


class TurnGrammars:
    """Compiles grammars, follows the output of each turn that has one, and makes the masks of a step.

    For one thread, the step loop's, which none of its methods blocks. ``executor``: in place of threads of its own.
    """

    def __init__(self, compiler: GrammarCompiler, executor: Executor | None = None) -> None:
        self._compiler = compiler
        self._compiling = executor or ThreadPoolExecutor(NUM_THREADS, "holdfast-grammar")
        self._masking = executor or ThreadPoolExecutor(1, "holdfast-mask")
        self._compiled: OrderedDict[Hashable, Future[Any]] = OrderedDict()
        self._matchers: dict[str, Matcher] = {}
        self.looks_ahead = False
        """Whether ``forced`` is kept."""
        self.forced: dict[Turn, array[int]] = {}
        """Of turns whose grammar leaves no choice for a while, the tokens that come next."""

    def compile(self, grammar: Grammar) -> Future[Matcher]:
        """The compiled grammar, from the cache if it is there. The future may raise InvalidRequest."""
        return self._cached(grammar, self._compiler.compile)

    def compile_stops(self, patterns: tuple[str, ...]) -> Future[StopPatterns]:
        """As ``compile``."""
        return self._cached(patterns, self._compiler.compile_stops)

    def _cached(self, source: K, compile: Callable[[K], T]) -> Future[T]:
        future: Future[T] | None = self._compiled.get(source)
        if future is None:
            future = self._compiled[source] = self._compiling.submit(compile, source)
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return future

    def begin(self, turn: Turn, compiled: Matcher) -> None:
        """Follow a turn. After a failover it has output already. Raises InvalidRequest, as ``push`` does."""
        matcher = self._matchers[turn.turn_id] = compiled.deep_copy()
        for token in turn.tokens[turn.prompt_len :]:
            _consume(matcher, token, turn)
        self._look_ahead(turn, matcher)

    def push(self, turn: Turn) -> None:
        """The turn's last token is new. Raises InvalidRequest if the grammar became too complex to follow."""
        matcher = self._matchers.get(turn.turn_id)
        if matcher is not None:
            _consume(matcher, turn.tokens[-1], turn)
            self._look_ahead(turn, matcher)

    def _look_ahead(self, turn: Turn, matcher: Matcher) -> None:
        """The turn's last token is new."""
        if not self.looks_ahead:
            return
        known = self.forced.pop(turn, None)
        if known is not None and len(known) > 1 and known[0] == turn.tokens[-1]:
            self.forced[turn] = known[1:]
        elif 0 < len(matcher.compute_ff_bytes()) <= MAX_FORCED_BYTES and (tokens := matcher.compute_ff_tokens()):
            self.forced[turn] = array("i", tokens)

    def complete(self, turn: Turn) -> bool:
        """Whether the turn has a grammar, and nothing but the end token can follow its output."""
        matcher = self._matchers.get(turn.turn_id)
        return matcher is not None and matcher.is_stopped()

    def forget(self, turn: Turn) -> None:
        """The turn has ended."""
        self._matchers.pop(turn.turn_id, None)
        self.forced.pop(turn, None)

    def allowed(self, turn: Turn, draft: array[int]) -> int:
        """How many tokens of a draft the turn's grammar allows, from the first on."""
        matcher = self._matchers.get(turn.turn_id)
        return len(draft) if matcher is None else matcher.validate_tokens(draft.tolist())

    def masks(self, work: Sequence[Work]) -> Future[Masks] | None:
        """By id of each turn that has a grammar: its allowed tokens, a bit each, after its last token and after each
        of its draft's. Computed beside the forward pass.
        """
        wanted = {
            w.turn.turn_id: (
                self._matchers[w.turn.turn_id],
                w.draft.tokens if w.draft is not None else NO_TOKENS,
                self.forced.get(w.turn, NO_TOKENS),
            )
            for w in work
            if w.turn.turn_id in self._matchers
        }
        if not wanted:
            return None
        return self._masking.submit(lambda: {turn_id: self._masks(*of_turn) for turn_id, of_turn in wanted.items()})

    def _masks(self, matcher: Matcher, draft: array[int], forced: array[int]) -> list[bytes]:
        """The masks before each token of a draft, which the grammar allows, and after it. ``forced`` comes next."""
        # A matcher would find out for each mask again what is forced, all of it, in 20 us.
        if len(forced) > len(draft) and forced[: len(draft)] == draft:
            return [self._compiler.mask_of(token) for token in forced[: len(draft) + 1]]
        # A copy, because ``rollback`` miscounts past an end token; it takes 2 us.
        ahead, masks = matcher.deep_copy() if draft else matcher, []
        for i in range(len(draft) + 1):
            if i:
                ahead.consume_token(draft[i - 1])
            is_forced = i < len(forced) and forced[:i] == draft[:i]
            masks.append(self._compiler.mask_of(forced[i]) if is_forced else ahead.compute_bitmask())
        return masks

    def close(self) -> None:
        """End the threads."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._masking.shutdown(wait=False, cancel_futures=True)


def _consume(matcher: Matcher, token: int, turn: Turn) -> None:
    if matcher.is_stopped() and not matcher.is_error():
        return  # the end token
    if not matcher.consume_token(token):
        param = turn.params.grammar.param if turn.params.grammar is not None else None
        raise InvalidRequest(f"{param}: the grammar cannot be followed further: {matcher.get_error()}", param)
