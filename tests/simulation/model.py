"""The model that simulated ranks compute: a token is a hash of all tokens before it, as the KV pages hold them.

So a wrong page, a missing copy or a cut too deep shows as a wrong token at a client, who can tell the
right one from the transcript alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from workers.config import EngineConfig
from workers.engine.rank import Batch, StepResult
from workers.engine.step_log import RecordedCache
from workers.kv import PageCopy, SessionCache, TableUpdate
from workers.models.parallel import Shard
from workers.scheduling import Step

VOCABULARY = 97
PAIR = struct.Struct("<qQ")
MASK = 2**64 - 1


def chained(tokens: Iterable[int], chain: int = 0) -> int:
    for token in tokens:
        chain = ((chain ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & MASK
        chain ^= chain >> 29
    return chain


def next_token(chain: int, seed: int) -> int:
    return chained((seed,), chain) % VOCABULARY


def expected_output(history: Sequence[int], seed: int, count: int) -> list[int]:
    """What a fault-free model says after ``history``."""
    chain, output = chained(history), []
    for _ in range(count):
        output.append(next_token(chain, seed))
        chain = chained(output[-1:], chain)
    return output


class SimulatedKV:
    """Pages of (token, chain) pairs."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: dict[int, list[tuple[int, int]]] = {}
        self.page_bytes = page_size * PAIR.size

    def page(self, page: int) -> list[tuple[int, int]]:
        return self._pages.setdefault(page, [(-1, 0)] * self._page_size)

    def copy(self, source: int, target: int) -> None:
        self._pages[target] = list(self.page(source))

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        return [b"".join(PAIR.pack(*pair) for pair in self.page(page)) for page in pages]

    def write_pages(self, pages: Sequence[int], data: Sequence[bytes]) -> None:
        for page, content in zip(pages, data, strict=True):
            self._pages[page] = list(PAIR.iter_unpack(content))


class SimulatedRank:
    """In place of ``Rank``: the real cache, and no model."""

    def __init__(self, config: EngineConfig, group: Any = None) -> None:
        self.shard = group.shard if group is not None else Shard()
        self.model_config = SimpleNamespace(eos_token_ids=(), vocab_size=VOCABULARY)
        assert config.context_length is not None and config.max_total_tokens is not None
        self.context_len = config.context_length
        leads = self.shard.size > 1 and self.shard.rank == 0
        kind = RecordedCache if leads else SessionCache
        self.cache = kind(config.max_total_tokens // config.page_size, config.page_size, config.max_sessions)
        self._tables: dict[tuple[int, int], int] = {}
        self.kv = SimulatedKV(config.page_size)
        self.layout = f"{config.page_size}, {self.shard.size} ranks"

    def apply(self, step: Step, batch: Batch) -> StepResult:
        chains = iter(self.compute(batch, step.copies, step.table_updates))
        result = StepResult()
        for work, chain in zip(step.work, chains, strict=True):
            if work.samples:
                result.tokens[work.turn.turn_id] = next_token(chain, work.turn.params.seed)
        return result

    def compute(self, batch: Batch, copies: Sequence[PageCopy], table_updates: Sequence[TableUpdate]) -> list[int]:
        """Each turn's chain after its share of the batch, from what the pages say of all before."""
        for row, column, page in table_updates:
            self._tables[row, column] = page
        for copy in copies:
            self.kv.copy(copy.source, copy.target)
        self.cache.finish_copies(len(copies))
        chains, at = [], 0
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            # A decode trusts its last position, a longer share reads all that attention would.
            chain = self._read(row, start) if count > 1 else self._entry(row, start - 1)[1] if start else 0
            for position, token in enumerate(batch.tokens[at : at + count], start):
                chain = chained((token,), chain)
                page, offset = self._place(row, position)
                self.kv.page(page)[offset] = (token, chain)
            at += count
            chains.append(chain)
        return chains

    def _read(self, row: int, length: int) -> int:
        return chained(self._entry(row, position)[0] for position in range(length))

    def _entry(self, row: int, position: int) -> tuple[int, int]:
        page, offset = self._place(row, position)
        return self.kv.page(page)[offset]

    def _place(self, row: int, position: int) -> tuple[int, int]:
        column, offset = divmod(position, self.cache.page_size)
        return self._tables[row, column], offset
