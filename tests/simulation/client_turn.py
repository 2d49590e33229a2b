"""A turn as its simulated client sees it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from holdfast.tokens import pack_tokens
from holdfast.v1 import session_pb2
from tests.simulation.model import GRAMMAR, VOCABULARY, expected_output


class ClientTurn:
    """What was asked for, what must come, and what has come."""

    def __init__(self, turn_id: str, keep_len: int | None, given: list[int], max_tokens: int) -> None:
        self.id, self.keep_len, self.input, self.max_tokens = turn_id, keep_len, given, max_tokens
        self.seed = 0
        self.expected: list[int] = []
        self.seen: list[int] = []
        self.done = self.resumes = False
        self.excused = False
        """A router had a reason to roll the turn back, and the client knows of it."""
        self.leaves_at: int | None = None
        self.checks = True

    @property
    def in_grammar(self) -> bool:
        return self.seed % 4 == 0

    def output_after(self, history: Sequence[int]) -> list[int]:
        """What a fault-free cluster answers."""
        return expected_output(history, self.seed, self.max_tokens, in_grammar=self.in_grammar)

    def sampling(self) -> session_pb2.Sampling:
        sampling = session_pb2.Sampling(temperature=1.0, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=True)
        sampling.background = self.seed % 5 == 0
        if self.in_grammar:
            sampling.grammar.CopyFrom(session_pb2.Grammar(regex=GRAMMAR))
        if self.seed % 3 == 0:  # it is wrong at a few places
            predicted = [(token + (i % 5 == 4)) % VOCABULARY for i, token in enumerate(self.expected)]
            sampling.prediction = pack_tokens(array("i", predicted))
        return sampling
