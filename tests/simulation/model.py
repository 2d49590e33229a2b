"""The model that simulated ranks compute: a token is a hash of all tokens before it, as the KV pages hold them.

So a wrong page, a missing copy or a cut too deep shows as a wrong token at a client, who can tell the
right one from the transcript alone.
"""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from threading import RLock
from types import SimpleNamespace
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from workers.config import EngineConfig
from workers.engine.batch import Batch
from workers.engine.choice import StepResult
from workers.engine.rank import NotePages, Rank
from workers.engine.step_log import RecordedCache
from workers.engine.stream import Stream
from workers.grammar.compiler import GrammarCompiler
from workers.grammar.turns import Masks
from workers.kv import (
    GroupSpec,
    PageCopy,
    SessionCache,
    TableUpdate,
    full_group,
    latent_group,
    window_group,
)
from workers.models.parallel import Shard
from workers.scheduling import Turn, Work
from workers.scheduling.model_speculation import DraftJob

VOCABULARY = 97
PAIR = struct.Struct("<qQ")
MASK = 2**64 - 1


def chained(tokens: Iterable[int], chain: int = 0) -> int:
    for token in tokens:
        chain = ((chain ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & MASK
        chain ^= chain >> 29
    return chain


def next_token(chain: int, seed: int, allowed: Sequence[int] = range(VOCABULARY)) -> int:
    return allowed[chained((seed,), chain) % len(allowed)]


def expected_output(history: Sequence[int], seed: int, count: int, *, in_grammar: bool = False) -> list[int]:
    """What a fault-free model says after ``history``."""
    return next_tokens(history, seed, count, in_grammar)


def next_tokens(tokens: Iterable[int], seed: int, count: int, in_grammar: bool, num_output: int = 0) -> list[int]:
    """As ``expected_output``, after tokens of which the last ``num_output`` are output."""
    chain, output = chained(tokens), []
    for i in range(num_output, num_output + count):
        output.append(next_token(chain, seed, ALLOWED[i % len(ALLOWED)] if in_grammar else range(VOCABULARY)))
        chain = chained(output[-1:], chain)
    return output


def guess(turn: Turn, count: int) -> array[int]:
    """What a turn may say next: right up to a random token."""
    num_right = random.choice([0, 1, count // 2, count, count])
    in_grammar = turn.params.grammar is not None
    draft = next_tokens(turn.tokens, turn.params.seed, min(num_right, count), in_grammar, turn.num_output)
    return array("i", draft + [random.randrange(VOCABULARY) for _ in range(count - len(draft))])


def text_of(token: int) -> str:
    """The token in a grammar."""
    return f"{chr(ord('a') + token // 10)}{token % 10}"


ALLOWED = (range(40), range(40, 70), range(50, 51), range(20, 21), range(70, VOCABULARY))
"""In the grammar of simulated clients: the tokens at each fifth position of an output. Two leave no choice."""
GRAMMAR = "(" + "".join(f"({'|'.join(map(text_of, tokens))})" for tokens in ALLOWED) + ")*"


class SimulatedTokenizer:
    """In place of a tokenizer's file, for the grammars: each token is two characters, and one more ends a text."""

    bos_token_id = None
    eos_token_id = VOCABULARY
    special_token_ids = (VOCABULARY,)
    tokens = (*(text_of(token).encode() for token in range(VOCABULARY)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode()
        return [self.tokens.index(text[i : i + 2].encode()) for i in range(0, len(text), 2)]


class SimulatedCompiler(GrammarCompiler):
    """The real compiler, for the simulated vocabulary."""

    def __init__(self) -> None:
        super().__init__(Path(), VOCABULARY + 1, (VOCABULARY,))

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(SimulatedTokenizer()))


COMPILER = SimulatedCompiler()


def _tokens_in(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token for token in range(VOCABULARY) if bits >> token & 1]


class SimulatedKV:
    """Pages of (token, chain) pairs, by KV group. Each rank's bytes are its own, as those of shards are."""

    def __init__(self, page_size: int, num_groups: int, rank: int) -> None:
        self._page_size, self._rank = page_size, rank
        self._pages: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.page_bytes = [page_size * PAIR.size] * num_groups

    def page(self, group: int, page: int) -> list[tuple[int, int]]:
        return self._pages.setdefault((group, page), [(-1, 0)] * self._page_size)

    def copy(self, group: int, source: int, target: int) -> None:
        self._pages[group, target] = list(self.page(group, source))

    def zero_pages(self, group: int, pages: Sequence[int]) -> None:
        for page in pages:
            self._pages.pop((group, page), None)

    def read_pages(self, group: int, pages: Sequence[int]) -> list[bytes]:
        rank = self._rank
        return [b"".join(PAIR.pack(t, chain ^ rank) for t, chain in self.page(group, page)) for page in pages]

    def read_pages_into(self, group: int, pages: Sequence[int], targets: Sequence[memoryview]) -> None:
        for target, data in zip(targets, self.read_pages(group, pages), strict=True):
            target[:] = data

    def write_pages(self, group: int, pages: Sequence[int], data: bytes | memoryview) -> None:
        received = [(t, chain ^ self._rank) for t, chain in PAIR.iter_unpack(data)]
        size = len(received) // len(pages)
        for i, page in enumerate(pages):
            self._pages[group, page] = received[i * size : (i + 1) * size]


GROUPS: dict[str, Callable[[int], list[GroupSpec]]] = {
    "full": lambda pages: [full_group(pages)],
    "latent": lambda pages: [latent_group(pages)],
    "window": lambda pages: [window_group(pages, 9)],
    "full + window": lambda pages: [full_group(pages), window_group(pages * 3 // 4, 9)],
    "window + latent + window": lambda pages: [window_group(pages, 3), latent_group(pages), window_group(pages, 30)],
}
"""The kinds of KV that simulated models have, given the pages of a group that keeps all tokens."""


class SimulatedRank:
    """In place of ``Rank``: the real cache, and no model."""

    kinds = "full"
    grammar_compiler = COMPILER

    def __init__(self, config: EngineConfig, group: Any = None) -> None:
        self.shard = group.shard if group is not None else Shard()
        self.model_config = SimpleNamespace(eos_token_ids=(), vocab_size=VOCABULARY)
        assert config.context_length is not None and config.max_total_tokens is not None
        assert config.chunked_prefill_size is not None
        self.context_len, self.step_tokens = config.context_length, config.chunked_prefill_size
        leads = self.shard.size > 1 and self.shard.rank == 0
        kind = RecordedCache if leads else SessionCache
        groups = GROUPS[self.kinds](config.max_total_tokens // config.page_size)
        self.cache = kind(groups, config.page_size, config.max_sessions, config.resume_points)
        self._tables: dict[tuple[int, int, int], int] = {}
        self.kv = SimulatedKV(config.page_size, len(groups), self.shard.rank)
        self.layout = f"{config.page_size}, {self.shard.size} ranks"
        self.overlaps = bool(config.overlap_schedule)
        self.stream, self.writes_at_once, self.cache_lock = Stream(), not self.overlaps, RLock()
        self._broadcasts: list[list[int]] = group.broadcasts if group is not None else []
        self._num_broadcasts = 0
        self._note_pages: NotePages | None = None
        self._zeroes = config.zero_freed_pages
        self.zero_freed()
        self._has_head = config.speculative_algorithm == "EAGLE3"

    def update(self, copies: Sequence[PageCopy], table_updates: Sequence[TableUpdate]) -> None:
        self.zero_freed()
        for group, row, first, pages in table_updates:
            self._tables.update(((group, row, column), page) for column, page in enumerate(pages, first))
        for copy in copies:
            self.kv.copy(*copy)

    watch_pages, tell_pages, zero_freed = Rank.watch_pages, Rank.tell_pages, Rank.zero_freed

    def launch(self, batch: Batch, num_copies: int) -> None:
        """Compute each turn's chains in its share of the batch, from what the pages say of all before."""
        self.cache.finish_copies(num_copies)
        self._chains, at, fed = [], 0, self._fed(batch)
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            chain = self._chain_before(row, start, count)
            self._chains.append([])
            for position, token in enumerate(batch.tokens[at : at + count], start):
                if token < 0:
                    token = next(fed)
                chain = chained((token,), chain)
                for group in range(len(self.cache.groups)):
                    page, offset = self._place(group, row, position)
                    self.kv.page(group, page)[offset] = (token, chain)
                self._chains[-1].append(chain)
            at += count

    def draft(self, jobs: Sequence[DraftJob]) -> tuple[dict[str, array[int]], int]:
        """In place of a draft model, whose KV would be where it is written here: in pages that the turn holds.

        A head needs what the model computed one position before.
        """
        host = next((group.index for group in self.cache.groups if not group.window), None)
        for job in jobs if host is not None else ():
            for position in range(job.start, job.end + max(0, job.num_draft - 1)):
                self._place(host, job.row, position)
            if self._has_head and job.end > 1:
                assert self._entry(host, job.row, job.end - 2)[0] == job.turn.tokens[job.end - 2], "not computed yet"
        return {job.turn.turn_id: guess(job.turn, job.num_draft) for job in jobs if job.num_draft}, 1

    def choose(self, work: Sequence[Work], masks: Future[Masks] | None = None) -> Future[StepResult]:
        result, allowed = StepResult(), masks.result() if masks is not None else {}
        for w, chains in zip(work, self._chains, strict=True):
            if w.samples and not w.turn.ended:
                all_masks = allowed.get(w.turn.turn_id, [b"\xff" * VOCABULARY] * w.num_samples)
                result.tokens[w.turn.turn_id] = [
                    next_token(chain, w.turn.params.seed, _tokens_in(mask))
                    for chain, mask in zip(chains[-w.num_samples :], all_masks, strict=True)
                ]
        self._chosen = [tokens[0] for tokens in result.tokens.values()]
        return self.stream.run(lambda: result)

    def _fed(self, batch: Batch) -> Iterator[int]:
        """The batch's tokens that are in flight, as the leader's device has them."""
        if not any(token < 0 for token in batch.tokens):
            return iter(())
        if self.shard.rank == 0:
            self._broadcasts.append([self._chosen[-1 - token] for token in batch.tokens if token < 0])
        self._num_broadcasts += 1
        return iter(self._broadcasts[self._num_broadcasts - 1])

    def _chain_before(self, row: int, start: int, count: int) -> int:
        """What the pages say of all tokens before ``start``; a wrong answer if two groups differ."""
        chains = []
        for group in self.cache.groups:
            # A whole-prefix group: a decode trusts its last position, a longer share reads all that attention would.
            if not group.window and count > 1:
                chains.append(chained(self._entry(group.index, row, p)[0] for p in range(start)))
                continue
            first = start - 1 if not group.window else max(0, start - group.window + 1)
            chain = self._entry(group.index, row, first)[1] if 0 <= first < start else None
            for position in range(first + 1, start) if chain is not None else ():
                # The window's first position is trusted, the others follow from it.
                chain = chained((self._entry(group.index, row, position)[0],), chain)
            if chain is not None:
                chains.append(chain)
        return chains[0] if len(set(chains)) == 1 else chained(chains)

    def _entry(self, group: int, row: int, position: int) -> tuple[int, int]:
        page, offset = self._place(group, row, position)
        return self.kv.page(group, page)[offset]

    def _place(self, group: int, row: int, position: int) -> tuple[int, int]:
        column, offset = divmod(position, self.cache.page_size)
        return self._tables[group, row, column], offset
